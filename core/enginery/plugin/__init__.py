"""Finding, checking and choosing plugins: hookspecs, metadata-first loader, strict checker, selection, manifest."""
