//! What a request may suffer: whether sending it twice does harm.
//!
//! # Why
//!
//! A retried charge is a second charge. Whether a request may be sent again is therefore a property
//! of the request, joined with the evidence that its last reply gives: a 429 proves that nothing
//! happened, a timeout after the request was sent proves nothing. Status codes alone cannot tell
//! (kube-rs/kube#2082: repeated POSTs). Agents make it worse: the tool that was called is written by
//! somebody else, the framework retries what it calls "transient", and then the model is told that the
//! call failed and makes it once more (langchain-ai/langchain#40688).
//!
//! # Where a safety comes from
//!
//! | source | what is taken |
//! |---|---|
//! | the caller says so: `request.extensions_mut().insert(Safety::Costly)`, or [`HasTask::safety`](crate::HasTask::safety) | as it is; it goes before everything below |
//! | HTTP method | GET, HEAD, OPTIONS, TRACE: [`Safe`](Safety::Safe); PUT, DELETE: [`Keyed`](Safety::Keyed) |
//! | an `idempotency-key` header | [`Keyed`](Safety::Keyed) |
//! | what a tool's server declares: [`ToolHints::safety`] | read-only: `Safe`; idempotent: `Keyed`; **only if that server is trusted** |
//! | nothing known | [`Once`](Safety::Once) |
//!
//! [`with_key`](Safety::with_key) adds a key to a safety, [`join`](Safety::join) is that of several calls
//! in one.
//!
//! # The evidence
//!
//! | the last call | `Safe`, `Costly` | `Keyed` | `Once` |
//! |---|---|---|---|
//! | was not executed, by proof (429, no connection, refused stream) | again | again, anywhere | again |
//! | may have been executed (timeout, reset, 5xx) | again | again in its **domain** | not again |
//! | is being executed now (409 to a key in flight) | again | again in its domain, at no charge | not again |
//! | was executed and failed (a 4xx) | - | - | - |
//!
//! This holds for a retry layer and for a ladder alike. A key is known to the server that saw it, so its
//! domain is one rung; rungs that share their keys (two regions of one payment account) say so:
//! `Rung::domain`.
//!
//! # When the answer is "nobody knows"
//!
//! A call that [`is_in_doubt`](Safety::is_in_doubt) comes back as it ended, after one attempt. Do not hand
//! it to a model as "failed, try again": say that it may have taken effect, and have it looked up.
//! A second call then is a decision, and carries the same [`idempotency_key`]. `ToolCallsLayer` does the same
//! without being asked: in its task, a write in doubt is not called again.
//!
//! # Tool calls that are not HTTP
//!
//! ```
//! use tower_herd::{HasTask, Safety, Task, ToolHints, Trust, retry::Resent};
//!
//! #[derive(Clone)]
//! struct ToolCall {
//!     tool: String,
//!     arguments: serde_json::Value,
//!     /// From the server's list of tools.
//!     hints: ToolHints,
//!     /// Whether the operator has vouched for that server.
//!     trust: Trust,
//!     task: Option<Task>,
//!     resent: Option<Resent>,
//! }
//!
//! impl HasTask for ToolCall {
//!     fn safety(&self) -> Safety {
//!         self.hints.safety(self.trust)
//!     }
//!     // Without the task each call has an allowance and a deadline of its own.
//!     fn task(&self) -> Option<&Task> {
//!         self.task.as_ref()
//!     }
//!     fn set_task(&mut self, task: Task) {
//!         self.task = Some(task);
//!     }
//!     // A ladder needs this to keep a write where it may have taken effect.
//!     fn resent(&self) -> Option<&Resent> {
//!         self.resent.as_ref()
//!     }
//!     fn set_resent(&mut self, resent: Resent) {
//!         self.resent = Some(resent);
//!     }
//! }
//! # let call = ToolCall { tool: "x".into(), arguments: ().into(), hints: ToolHints::new().read_only(true),
//! #     trust: Trust::Vouched, task: None, resent: None };
//! # assert_eq!(call.safety(), Safety::Safe);
//! ```
//!
//! The example `tools` in the repository runs such calls against a tool server that fails.

mod key;
mod tools;

pub use key::{IdempotencyKey, idempotency_key};
pub use tools::{ToolHints, Trust};

use crate::signal::{Executed, Kind, Pushback, ResendAdvice, Signal};

/// How often a request may take effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum Safety {
    /// A read: repeating it changes nothing.
    Safe,
    /// Repeating it changes nothing but costs money (a completion). May be sent again.
    Costly,
    /// Repeatable inside one idempotency domain, by default the same rung: a write with an
    /// idempotency key, or by an idempotent method.
    Keyed,
    /// Must not take effect twice: the default of a write without a key.
    Once,
}

impl Safety {
    /// Whether a request of this safety may be sent again after `signal`.
    ///
    /// `same_domain`: the next attempt goes where the last one went (the same rung, or another one
    /// that is declared to share its idempotency keys).
    ///
    /// [`ResendAdvice::Never`] and [`Pushback::Never`] bind only the place that gave them, so they
    /// are looked at for the same domain only.
    #[must_use]
    pub fn allows(self, signal: &Signal, same_domain: bool) -> bool {
        if same_domain && (signal.resend == ResendAdvice::Never || signal.pushback == Pushback::Never) {
            return false;
        }
        if signal.kind == Kind::Refused || signal.executed == Executed::No {
            return true;
        }
        match self {
            Safety::Safe | Safety::Costly => true,
            Safety::Keyed => same_domain,
            Safety::Once => false,
        }
    }

    /// Whether the request may have taken effect and nobody can tell, so that it must be looked up and not
    /// just made again: the outcome of a write that failed without proof. A call of this kind is repeated
    /// neither by a retry layer nor by a ladder, unless its key makes that harmless.
    ///
    /// ```
    /// use tower_herd::{Safety, classify::signal_of_error};
    ///
    /// let error = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
    /// assert!(Safety::Once.is_in_doubt(&signal_of_error(&error)));
    /// assert!(!Safety::Safe.is_in_doubt(&signal_of_error(&error)), "a read leaves nothing behind");
    /// ```
    #[must_use]
    pub const fn is_in_doubt(self, signal: &Signal) -> bool {
        matches!(self, Safety::Keyed | Safety::Once)
            && matches!(signal.executed, Executed::Maybe)
            && !signal.kind.is_success()
    }

    /// The same request with an idempotency key: what must not take effect twice becomes repeatable where
    /// the key is known. The others stay what they are.
    #[must_use]
    pub const fn with_key(self) -> Self {
        match self {
            Safety::Once => Safety::Keyed,
            other => other,
        }
    }

    /// The safety of one request that makes several calls (a batch): that of the most delicate of them.
    #[must_use]
    pub const fn join(self, other: Safety) -> Self {
        match (self, other) {
            (Safety::Once, _) | (_, Safety::Once) => Safety::Once,
            (Safety::Keyed, _) | (_, Safety::Keyed) => Safety::Keyed,
            (Safety::Costly, _) | (_, Safety::Costly) => Safety::Costly,
            (Safety::Safe, Safety::Safe) => Safety::Safe,
        }
    }
}

#[cfg(feature = "http")]
impl Safety {
    /// The safety of an HTTP request: its [`Safety`] extension if the caller put one there, else by
    /// method (RFC 9110, section 9.2) and idempotency key.
    ///
    /// GET, HEAD, OPTIONS and TRACE are [`Safe`](Safety::Safe). PUT and DELETE, and any request with
    /// an `idempotency-key` header, are [`Keyed`](Safety::Keyed). Everything else is
    /// [`Once`](Safety::Once): a gRPC call too, since its method tells nothing.
    #[must_use]
    pub fn of_http<B>(request: &http::Request<B>) -> Self {
        if let Some(declared) = request.extensions().get::<Safety>() {
            return *declared;
        }
        match *request.method() {
            http::Method::GET | http::Method::HEAD | http::Method::OPTIONS | http::Method::TRACE => {
                Safety::Safe
            }
            http::Method::PUT | http::Method::DELETE => Safety::Keyed,
            _ if request.headers().contains_key("idempotency-key") => Safety::Keyed,
            _ => Safety::Once,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the sturdiest to the most delicate.
    const ALL: [Safety; 4] = [Safety::Safe, Safety::Costly, Safety::Keyed, Safety::Once];

    #[test]
    fn a_write_is_sent_again_only_on_proof() {
        let proof = [Signal::new(Kind::Throttled), Signal::new(Kind::Failed).with_executed(Executed::No)];
        let doubt = [Signal::new(Kind::Failed), Signal::new(Kind::Overloaded)];
        for signal in proof {
            for safety in ALL {
                assert!(
                    safety.allows(&signal, true) && safety.allows(&signal, false),
                    "{safety:?} {signal:?}"
                );
            }
        }
        for signal in doubt {
            assert!(Safety::Safe.allows(&signal, false) && Safety::Costly.allows(&signal, false));
            assert!(Safety::Keyed.allows(&signal, true) && !Safety::Keyed.allows(&signal, false));
            assert!(!Safety::Once.allows(&signal, true) && !Safety::Once.allows(&signal, false));
        }
    }

    #[test]
    fn a_write_that_failed_without_proof_is_in_doubt() {
        for safety in ALL {
            let is_write = matches!(safety, Safety::Keyed | Safety::Once);
            assert_eq!(safety.is_in_doubt(&Signal::new(Kind::Failed)), is_write);
            for known in [Kind::Success, Kind::Throttled, Kind::Rejected, Kind::Refused] {
                assert!(!safety.is_in_doubt(&Signal::new(known)), "{safety:?} {known:?}");
            }
        }
    }

    #[test]
    fn keys_help_writes_and_batches_are_as_delicate_as_their_worst_call() {
        assert_eq!(ALL.map(Safety::with_key), [Safety::Safe, Safety::Costly, Safety::Keyed, Safety::Keyed]);
        for (i, one) in ALL.into_iter().enumerate() {
            for (k, other) in ALL.into_iter().enumerate() {
                assert_eq!(one.join(other), ALL[i.max(k)]);
            }
        }
    }

    #[test]
    fn advice_to_resend_never_overrides_the_requests_own_safety() {
        let allowed = Signal::new(Kind::Failed).with_resend(ResendAdvice::Allowed);
        assert!(!Safety::Once.allows(&allowed, true));
        let never = Signal::new(Kind::Throttled).with_resend(ResendAdvice::Never);
        assert!(!Safety::Safe.allows(&never, true) && Safety::Safe.allows(&never, false));
    }

    #[cfg(feature = "http")]
    #[test]
    fn http_requests_by_method_key_and_extension() {
        let of = |method: &str, key: bool| {
            let mut request = http::Request::builder().method(method);
            if key {
                request = request.header("Idempotency-Key", "k");
            }
            Safety::of_http(&request.body(()).unwrap())
        };
        for (method, plain, keyed) in [
            ("GET", Safety::Safe, Safety::Safe),
            ("HEAD", Safety::Safe, Safety::Safe),
            ("PUT", Safety::Keyed, Safety::Keyed),
            ("DELETE", Safety::Keyed, Safety::Keyed),
            ("POST", Safety::Once, Safety::Keyed),
            ("PATCH", Safety::Once, Safety::Keyed),
            ("PROPFIND", Safety::Once, Safety::Keyed),
        ] {
            assert_eq!((of(method, false), of(method, true)), (plain, keyed), "{method}");
        }
        let mut post = http::Request::post("/").body(()).unwrap();
        post.extensions_mut().insert(Safety::Costly);
        assert_eq!(Safety::of_http(&post), Safety::Costly);
    }
}
