//! The ramp: a recovering provider gets its traffic back by growing fractions.
