"""The console: pages for operators on the admin port. ``app`` has its routes; everything it shows is JSON first."""
