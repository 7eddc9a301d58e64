"""Changes of samples below the cut: another way in every epoch, the same on any rank and after any resume."""
