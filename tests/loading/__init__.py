"""Models loaded in every way people load them: quantised, packed, offloaded, adapted, compiled."""
