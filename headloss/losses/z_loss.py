def z_loss(lse):
    """lse^2: keeps the softmax's normaliser near 1 (Chowdhery et al. 2022)."""
    return lse**2, {"lse": lse}
