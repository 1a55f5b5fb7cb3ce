//! Tests of what only the sim has: its clock, faults and race detector.
