"""Small programs to be measured beside uvimg, written for this project."""
