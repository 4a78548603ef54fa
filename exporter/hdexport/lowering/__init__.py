"""The parts that the lowerings of attention share: nodes, masks, fused attention, tables."""
