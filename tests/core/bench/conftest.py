"""The scripted server."""

from scripted_server import server as server
