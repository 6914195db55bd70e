"""The viewer: a run in the browser, from a local server or as one file.

`rows` finds groups, `details` tells one of them, both as plain JSON values; `server` serves them to
the page in `page/`, `export` puts them into it.
"""
