"""How ranks have ended, which of them failed first, and the words for it."""
