"""Front-ends: bytes on a socket ↔ Request and Response. They translate, no more."""
