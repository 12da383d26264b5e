"""`python -m uvimg` is the `uvimg` command."""

from uvimg.cli import main

raise SystemExit(main())
