"""Decisions: plain functions of plain values. No I/O, no clock, no asyncio, nothing of ours from outside."""
