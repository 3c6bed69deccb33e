"""Pages in which a model runs in the browser, each one self-contained HTML file without a network.

The templates hold the HTML, CSS and JavaScript; the modules describe models for them. Nothing here trains or samples.
"""

from mvrbm.page.enlarge import write_enlarging_page
from mvrbm.page.playground import write_page

__all__ = ["write_enlarging_page", "write_page"]
