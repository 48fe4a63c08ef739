//! The amplification guard: what stacks above and below are told of attempts.
