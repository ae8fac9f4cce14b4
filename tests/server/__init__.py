"""The HTTP server, as clients, attackers and operators meet it."""
