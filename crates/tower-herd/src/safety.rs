//! What a request may suffer: whether sending it twice does harm.
//!
//! A retried charge is a second charge. Whether a request may be sent again is therefore a property
//! of the request, joined with the evidence that its last reply gives: a 429 proves that nothing
//! happened, a timeout after the request was sent proves nothing. Status codes alone cannot tell
//! (kube-rs/kube#2082: repeated POSTs).

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

    #[test]
    fn a_write_is_sent_again_only_on_proof() {
        let proof = [Signal::new(Kind::Throttled), Signal::new(Kind::Failed).with_executed(Executed::No)];
        let doubt = [Signal::new(Kind::Failed), Signal::new(Kind::Overloaded)];
        for signal in proof {
            for safety in [Safety::Safe, Safety::Costly, Safety::Keyed, Safety::Once] {
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
