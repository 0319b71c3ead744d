"""Local programs: how operators run on blocks of what their rules need whole, with communication of their own."""
