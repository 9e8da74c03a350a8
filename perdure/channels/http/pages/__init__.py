"""The web chat: a page at `/` and its scripts, served as they are, without a build step.

routes.py    serves the files with their headers
static/      chat.html, chat.css, and the scripts: chat.js (the page), api.js (requests and event streams),
             turn.js (one turn, updated by its events), text.js (Markdown), elements.js (DOM nodes); in vendor/,
             the browser build of markdown-it as its npm package has it, and the licences of what it contains

The scripts never interpret text as HTML and load nothing from other hosts.
"""
