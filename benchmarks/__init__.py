"""What a boosted step costs beside Adam's: `make bench`."""
