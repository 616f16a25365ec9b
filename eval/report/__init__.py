"""What people read: tables, Markdown, plots and the HTML page."""
