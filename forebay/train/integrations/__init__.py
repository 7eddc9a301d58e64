"""What other frameworks need to hand a loader over, to evaluate with one and to resume rightly; each file needs its framework."""
