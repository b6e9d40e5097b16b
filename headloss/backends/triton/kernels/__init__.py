"""Device code of the Triton backend.  It knows facts and coefficients; no loss is named here."""
