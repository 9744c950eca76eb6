"""``python -m tests.facade.behaviours`` writes docs/tf-distribute-behaviours.md from the cases."""

from tests.facade.behaviours import page

page.PAGE.write_text(page.written(), encoding="utf-8")
