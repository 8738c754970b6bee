"""The server, a template database with an Instance in it, and sessions on a copy.

Each test process has one database, a copy of its template. The database is emptied
after each test, and replaced after a test that left more than rows behind. Its Instance
is in schema ``jobs_email``; the sessions below have it in their search_path. Roles belong
to the whole server, so the group roles carry the name of the process (``prefix``); the
callers are the same everywhere.
"""

pytest_plugins = [
    "fixtures.selection",
    "fixtures.server",
    "fixtures.database",
    "fixtures.sessions",
    "fixtures.jobs",
    "fixtures.floors",
    "fixtures.workers",
]
