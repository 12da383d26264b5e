"""The pages for people: package data beside this file."""
