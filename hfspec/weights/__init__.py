"""Models by name: where they lie on this machine, and how those that ship as pip packages are fetched."""
