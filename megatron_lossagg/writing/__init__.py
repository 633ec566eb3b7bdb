"""How a command writes: text, whole files and HTML pages, and the packages that it needs."""
