"""The explorer: a server for one index, and the page that it shows to people."""
