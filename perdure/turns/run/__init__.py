"""Running a claimed turn: the step loop, its commits, its settlement and its snapshot."""
