//! What a call has used: read from its reply, once, while the reply passes.
//!
//! A limit on tokens or on money knows what a call costs only when its reply has come; in a stream that
//! is its last event. Whoever counts at the head of the reply counts nothing, and whoever collects the
//! body to parse it takes the stream from the caller. So the body is read as it passes, piece by piece, by
//! a machine without a buffer ([`Reader`]); its bytes and frames are handed on as they are.
//!
//! Both [`SpendLayer`](crate::spend) and [`TokenLimitLayer`](crate::token_limit) take a [`Meter`]:
//!
//! | reply | meter |
//! |---|---|
//! | a completion over HTTP, whole or as a stream of events | [`llm`], with what a [`Usage`] weighs: `Prices`, or a closure |
//! | a reply whose type tells what it has cost, HTTP or not | [`of_reply`] |
//!
//! Where both layers meter the same reply, the inner one reads it, and tells the outer one.
//!
//! # What is not told
//!
//! A body that is dropped or breaks before its last word, one that is compressed, or in another language
//! than JSON, tells nothing for sure, nor does one that tells of more than 10^9 tokens: the call stays charged with its estimate, or with what it had used
//! so far, if that is more. OpenAI's streams tell their usage only if asked
//! (`stream_options: {"include_usage": true}`).

use crate::{BoxError, Executed};
use std::error::Error;

#[cfg(feature = "http")]
mod body;
mod reader;

#[cfg(feature = "http")]
pub use body::MeteredBody;
pub use reader::{Form, Reader};

/// Tokens of one call, as its reply tells them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// All that went in, cached or not.
    pub input: u64,
    /// The part of `input` that came from the provider's cache.
    pub cached: u64,
    /// The part of `input` that was written to it, where that has a price of its own.
    pub cache_write: u64,
    /// What came out, thoughts included.
    pub output: u64,
}

impl Usage {
    /// All tokens, in and out.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.input.saturating_add(self.output)
    }
}

/// What a [`Usage`] comes to: in money, or in the tokens that a limit counts. A closure, or `Prices`.
pub trait Weigh {
    /// What it is weighed in.
    type Unit;
    /// The weight of `usage`.
    fn weigh(&self, usage: &Usage) -> Self::Unit;
}

impl<F: Fn(&Usage) -> U, U> Weigh for F {
    type Unit = U;
    fn weigh(&self, usage: &Usage) -> U {
        self(usage)
    }
}

/// All tokens weigh alike.
#[derive(Clone, Copy, Debug, Default)]
pub struct Total;

impl Weigh for Total {
    type Unit = u64;
    fn weigh(&self, usage: &Usage) -> u64 {
        usage.total()
    }
}

/// Finds out what a reply has cost: [`llm`] or [`of_reply`]. It decides the type of the reply.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot tell what a reply of type `{Res}` has cost",
    note = "for HTTP replies `usage::llm(weigh)`, for others `usage::of_reply(closure)`"
)]
pub trait Meter<Res>: sealed::Sealed {
    /// What it tells.
    type Unit;
    /// The reply, with what it holds until the cost is known.
    type Metered<G: Bill<Self::Unit>>;
    #[doc(hidden)]
    fn meter<G: Bill<Self::Unit>>(&self, reply: Res, bill: Option<G>) -> Self::Metered<G>;
}

/// What is settled when the cost of a call is known; dropped before, the call stays charged.
pub trait Bill<U>: sealed::Sealed + Sized {
    /// The call has cost this.
    #[doc(hidden)]
    fn settle(self, used: U);
    /// It had cost this when it was cut short: it cost no less than that.
    #[doc(hidden)]
    fn at_least(self, used: U);
    /// It was not executed.
    #[doc(hidden)]
    fn refund(self);
}

/// A reply has come: it holds the bill from here on, unless it says that the call was not executed.
#[inline]
pub(crate) fn settle_reply<Res, M, C, G>(
    reply: Res,
    mut bill: Option<G>,
    meter: &M,
    classify: &C,
) -> M::Metered<G>
where
    M: Meter<Res>,
    C: crate::Classify<Res>,
    G: Bill<M::Unit>,
{
    if bill.is_some()
        && !classify.is_plain_success(&reply)
        && classify.classify(Ok(&reply)).executed == Executed::No
        && let Some(bill) = bill.take()
    {
        bill.refund();
    }
    meter.meter(reply, bill)
}

/// An error has come in its place: where that proves nothing, the call stays charged.
#[cold]
#[inline(never)]
pub(crate) fn settle_error<Res, U, C, G>(error: BoxError, bill: Option<G>, classify: &C) -> BoxError
where
    C: crate::Classify<Res>,
    G: Bill<U>,
{
    if let Some(bill) = bill
        && classify.classify(Err(&*error as &(dyn Error + 'static))).executed == Executed::No
    {
        bill.refund();
    }
    error
}

pub(crate) mod sealed {
    #[allow(unnameable_types, reason = "so that nobody else can implement what is sealed by it")]
    pub trait Sealed {}
}

/// The meter of completions over HTTP. See [`llm`].
#[derive(Clone, Copy, Debug, Default)]
pub struct OfBody<W>(W);

/// Meters completions over HTTP: reads the [`Usage`] out of their bodies, whole or streamed, and weighs it.
///
/// ```
/// use tower_herd::usage::{Usage, llm};
///
/// // A provider that does not count cached tokens against its limit.
/// let meter = llm(|usage: &Usage| usage.total() - usage.cached.min(usage.input));
/// # let _ = meter;
/// ```
#[must_use]
pub const fn llm<W: Weigh>(weigh: W) -> OfBody<W> {
    OfBody(weigh)
}

impl<W> sealed::Sealed for OfBody<W> {}

#[cfg(feature = "http")]
impl<B: http_body::Body, W: Weigh + Clone> Meter<http::Response<B>> for OfBody<W> {
    type Unit = W::Unit;
    type Metered<G: Bill<W::Unit>> = http::Response<MeteredBody<B, W, G>>;
    #[inline]
    fn meter<G: Bill<W::Unit>>(&self, reply: http::Response<B>, bill: Option<G>) -> Self::Metered<G> {
        let Some(bill) = bill else { return reply.map(MeteredBody::from) };
        let form = body::form(reply.headers());
        reply.map(|body| MeteredBody::new(body, form, self.0.clone(), bill))
    }
}

/// The meter of replies that say themselves what they have cost. See [`of_reply`].
#[derive(Clone, Copy)]
pub struct OfReply<F>(F);

/// Meters by the reply alone: `used` is given each reply, and says what it has cost; none if the reply does
/// not tell, and then the estimate stands. The reply passes unchanged.
///
/// ```
/// use tower_herd::usage::of_reply;
///
/// struct Found { pages: Vec<String>, credits: u64 }
/// let meter = of_reply(|found: &Found| Some(found.credits));
/// # let _ = meter;
/// ```
#[must_use]
pub const fn of_reply<F>(used: F) -> OfReply<F> {
    OfReply(used)
}

impl<F> std::fmt::Debug for OfReply<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OfReply")
    }
}

impl<F> sealed::Sealed for OfReply<F> {}

impl<Res, U, F: Fn(&Res) -> Option<U>> Meter<Res> for OfReply<F> {
    type Unit = U;
    type Metered<G: Bill<U>> = Res;
    #[inline]
    fn meter<G: Bill<U>>(&self, reply: Res, bill: Option<G>) -> Res {
        if let Some(bill) = bill
            && let Some(used) = (self.0)(&reply)
        {
            bill.settle(used);
        }
        reply
    }
}
