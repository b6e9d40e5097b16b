"""Programs that use headloss, to read and to run from a checkout."""
