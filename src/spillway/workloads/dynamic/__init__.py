"""Networks whose forward differs from sample to sample: what runs depends on a size, a tree, or what they learned."""
