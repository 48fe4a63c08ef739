//! The spend cap: what one task may cost.
