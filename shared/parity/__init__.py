"""Is it the same run? The ladder of checks that both backends must climb together, and the mutants that test it."""
