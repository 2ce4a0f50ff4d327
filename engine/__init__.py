"""How one run is carried out."""
