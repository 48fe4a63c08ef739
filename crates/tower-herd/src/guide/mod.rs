//! Pages about the use of the whole, where the other modules are about one layer each.
//!
//! | page | answers |
//! |---|---|
//! | [`order`] | why does each layer stand where it stands, and what breaks when two are swapped? |
//! | [`numbers`] | which ceiling, budget, timeout, breaker and ramp, from what, and what do the defaults cost? |
//! | [`observe_first`] | how do I try it in production before it decides anything, and turn a part off at night? |
//! | [`retries`] | who else repeats my calls, above and below, and how is that switched off? |

#[doc = include_str!("order.md")]
pub mod order {}
#[doc = include_str!("numbers.md")]
pub mod numbers {}
#[doc = include_str!("observe_first.md")]
pub mod observe_first {}
#[doc = include_str!("retries.md")]
pub mod retries {}
