"""A training step of any rank of any world, taken without computing or sending anything."""
