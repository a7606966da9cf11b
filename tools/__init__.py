"""Tools for those who develop the engine. They use the package; the package never imports them."""
