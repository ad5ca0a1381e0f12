"""The reducer: averages gradients over the ranks while backward still computes others."""
