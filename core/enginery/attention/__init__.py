"""Everything about attention that is no kernel."""
