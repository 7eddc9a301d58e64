"""What other frameworks need to take a loader, evaluate with a loader and resume rightly; a file a framework."""
