"""The asv suite. Parameters are constant whatever is installed; what cannot run is skipped, and asv shows it as n/a."""
