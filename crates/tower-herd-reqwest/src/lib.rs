//! The bridge to reqwest.
