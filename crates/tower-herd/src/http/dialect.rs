//! The order in which the parsers are asked, and the rules that join what they find.
//!
//! 1. What the status says (gRPC: its own status).
//! 2. What the body, where it was read, says instead.
//! 3. The wait, for [`Throttled`](Kind::Throttled), [`Overloaded`](Kind::Overloaded) and
//!    [`Depleted`](Kind::Depleted) only: millisecond headers, `Retry-After`, the body, and last the
//!    reset of the bucket that is empty. A hint that cannot be read falls through to the next.

use super::{
    body::{self, Found, Says},
    grpc,
    reset::{Glance, Limits, Requests, glance},
    retry_after, value,
};
use crate::{Executed, Kind, Pushback, Quota, Reach, ResendAdvice, Signal, refusal::REFUSED};
use http::{HeaderMap, HeaderValue, StatusCode, header::DATE};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What GitHub asks for when it speaks of its secondary limit.
const SECONDARY: Duration = Duration::from_secs(60);
/// Shorter waits than this do not describe a daily quota.
const LONG: Duration = Duration::from_secs(15 * 60);

/// The present, for absolute times: the reply's own `Date`, so that only the server's clocks are
/// compared with each other; without one the local wall clock. Neither is read before it is needed.
#[derive(Clone, Copy)]
pub(crate) struct Now<'a> {
    pub(crate) headers: &'a HeaderMap,
    pub(crate) wall: fn() -> SystemTime,
}

impl Now<'_> {
    /// The same by the reply's own `Date`, if it has one.
    pub(crate) fn date(&self) -> Option<Duration> {
        self.headers.get(DATE).and_then(|date| value::http_date(date.as_bytes()))
    }

    /// Time since the Unix epoch.
    pub(crate) fn get(&self) -> Duration {
        self.date().unwrap_or_else(|| (self.wall)().duration_since(UNIX_EPOCH).unwrap_or_default())
    }
}

fn limits(headers: &HeaderMap) -> Limits<'_> {
    let mut limits = Limits::new();
    for (name, value) in headers {
        limits.add(name.as_str(), value);
    }
    limits
}

/// What a reply says, as far as its head tells.
#[inline]
pub(crate) fn head(status: StatusCode, headers: &HeaderMap, wall: fn() -> SystemTime) -> Signal {
    if !is_success(status) {
        error(status, headers, None, wall)
    } else if headers.is_empty() {
        Signal::new(Kind::Success)
    } else {
        success(headers, wall)
    }
}

/// The one pass over the headers of a success: is it one for gRPC too, and what quota do they tell?
#[inline(never)]
fn success(headers: &HeaderMap, wall: fn() -> SystemTime) -> Signal {
    let mut requests = Requests::default();
    for (name, value) in headers {
        let name = name.as_str();
        match glance(name) {
            Glance::Other => {}
            Glance::Grpc if name == grpc::STATUS => return grpc::signal(value, headers),
            Glance::Grpc => {}
            Glance::Limits => requests.add(name, value),
        }
    }
    let success = Signal::new(Kind::Success);
    if !requests.any() {
        return success;
    }
    let now = Now { headers, wall };
    success.with_quota(requests.quota(now).or_else(|| other_quota(headers, wall)))
}

#[cold]
#[inline(never)]
fn other_quota(headers: &HeaderMap, wall: fn() -> SystemTime) -> Option<Quota> {
    limits(headers).quota(Now { headers, wall })
}

/// What an error reply says whose body, or the first part of it, has been read.
#[cold]
pub(crate) fn error_body(
    status: StatusCode,
    headers: &HeaderMap,
    body: &[u8],
    wall: fn() -> SystemTime,
) -> Signal {
    error(status, headers, Some(body::of_error(body)), wall)
}

/// What an error says that was found inside a success with these headers.
#[cold]
pub(crate) fn hidden(found: Found, headers: &HeaderMap, wall: fn() -> SystemTime) -> Signal {
    let status = found.status.and_then(|status| StatusCode::from_u16(status).ok());
    let status = status.unwrap_or(match found.says {
        Some(Says::Throttled) => StatusCode::TOO_MANY_REQUESTS,
        Some(Says::Rejected) => StatusCode::BAD_REQUEST,
        Some(Says::Misconfigured | Says::UnknownModel) => StatusCode::UNAUTHORIZED,
        Some(Says::Depleted | Says::DepletedToday) => StatusCode::PAYMENT_REQUIRED,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    });
    error(status, headers, Some(found), wall)
}

pub(crate) fn is_success(status: StatusCode) -> bool {
    status.as_u16() < 400
}

#[cold]
#[inline(never)]
fn error(status: StatusCode, headers: &HeaderMap, found: Option<Found>, wall: fn() -> SystemTime) -> Signal {
    if let Some(status) = headers.get(grpc::STATUS).filter(|status| grpc::code(status.as_bytes()) != 0) {
        return grpc::signal(status, headers);
    }
    let found = found.unwrap_or_default();
    let now = Now { headers, wall };
    if status == StatusCode::SERVICE_UNAVAILABLE && headers.contains_key(REFUSED) {
        let told = retry_after::told(headers, now).map_or(Pushback::None, Pushback::After);
        return advise(Signal::refused_elsewhere(told), headers);
    }
    let limits = limits(headers);
    // What a gateway got and forwards is read like its own, and by the clock of whoever dated it.
    let inner_now =
        if found.headers.contains_key(DATE) { Now { headers: &found.headers, wall } } else { now };
    let said = retry_after::told(headers, now)
        .or_else(|| found.wait.map(|when| when.wait(|| now.get())))
        .or_else(|| retry_after::told(&found.headers, inner_now));
    // A text for people may say how long to wait, but not turn one kind into another.
    let told = said.or(found.spoken);

    let mut signal = match status.as_u16() {
        402 => Signal::new(Kind::Depleted),
        // Atlassian sends `Retry-After: 0` with every reply: only a real wait turns "no" into "not now".
        403 if limits.wait(now, false).is_some() || said.is_some_and(|wait| !wait.is_zero()) => {
            Signal::new(Kind::Throttled)
        }
        401 | 403 => Signal::new(Kind::Misconfigured),
        408 => Signal::new(Kind::Failed),
        413 if said.is_some_and(|wait| !wait.is_zero()) => Signal::new(Kind::Overloaded),
        420 | 429 => Signal::new(Kind::Throttled),
        // Neither was processed (RFC 9110, 15.5.20; RFC 8470, 5.2).
        421 | 425 => {
            Signal::new(Kind::Rejected).with_resend(ResendAdvice::Allowed).with_executed(Executed::No)
        }
        // The key of the request is in flight: said by the body, or by a wait, which a conflict has none of.
        409 if found.says == Some(Says::InProgress) || said.is_some_and(|wait| !wait.is_zero()) => {
            Signal::in_progress()
        }
        400..=499 => Signal::new(Kind::Rejected),
        501 | 505 => Signal::new(Kind::Failed).with_resend(ResendAdvice::Never),
        529 => Signal::new(Kind::Overloaded),
        503 if said.is_some() => Signal::new(Kind::Overloaded),
        _ => Signal::new(Kind::Failed),
    };
    if (found.secondary || found.primary) && matches!(status.as_u16(), 403 | 429) {
        signal = Signal::new(Kind::Throttled);
    } else if let Some(says) = found.says {
        signal = amend(signal, says);
    }
    if found.one_model || (found.says == Some(Says::UnknownModel) && signal.kind == Kind::Misconfigured) {
        signal.reach = Reach::Scope;
    }

    let resets = |guess| {
        let inner = self::limits(&found.headers).wait(inner_now, guess);
        inner.or_else(|| limits.wait(now, guess))
    };
    let wait = match signal.kind {
        Kind::Throttled if found.secondary => told.or(Some(SECONDARY)),
        Kind::Throttled if told.is_none() && limits.is_out_for_long() => {
            signal = Signal::new(Kind::Depleted).with_reach(Reach::Scope);
            limits.wait(now, false)
        }
        Kind::Throttled => told.or_else(|| resets(true)).or(found.primary.then_some(SECONDARY)),
        // The other buckets tell when they are full again, not when this passes.
        Kind::Overloaded => told.or_else(|| resets(false)),
        Kind::Depleted if found.says == Some(Says::DepletedToday) => told.filter(|wait| *wait >= LONG),
        Kind::Depleted => told.or_else(|| resets(false)),
        _ if signal.resend == ResendAdvice::InProgress => told,
        _ => None,
    };
    if let Some(wait) = wait {
        signal.pushback = Pushback::After(wait);
    }
    if signal.kind == Kind::Throttled && (found.global || is_global(headers)) {
        signal.reach = Reach::Provider;
    }
    advise(signal, headers)
}

/// The kind of an error reply after its body has spoken.
fn amend(signal: Signal, says: Says) -> Signal {
    use Kind::{Depleted, Failed, Misconfigured, Overloaded, Rejected, Throttled};
    match (says, signal.kind) {
        (Says::Depleted | Says::DepletedToday, Throttled | Rejected | Misconfigured) => {
            let reach = if says == Says::Depleted { Reach::Provider } else { Reach::Scope };
            Signal::new(Depleted).with_reach(reach)
        }
        (Says::UnknownModel | Says::Misconfigured, Rejected) => Signal::new(Misconfigured),
        // Throttled by any other status: AWS says 400, Google 403, gateways 500.
        (Says::Throttled, Rejected | Misconfigured) => Signal::new(Throttled),
        // Behind a 5xx something else may have run before the call that was throttled.
        (Says::Throttled, Failed) => Signal::new(Throttled).with_executed(Executed::Maybe),
        (Says::Overloaded, Failed) => Signal::new(Overloaded),
        // DynamoDB and PayPal say so with another 4xx.
        (Says::InProgress, Rejected) => Signal::in_progress(),
        _ => signal,
    }
}

/// Discord's limit on the whole account.
fn is_global(headers: &HeaderMap) -> bool {
    let says = |name: &str, word: &[u8]| headers.get(name).is_some_and(|value| value.as_bytes() == word);
    says("x-ratelimit-global", b"true") || says("x-ratelimit-scope", b"global")
}

/// `x-should-retry`: "no" always counts; "yes" where trying again can help at all.
fn advise(signal: Signal, headers: &HeaderMap) -> Signal {
    match headers.get("x-should-retry").map(HeaderValue::as_bytes) {
        Some(b"false") => signal.with_resend(ResendAdvice::Never),
        Some(b"true") if signal.resend == ResendAdvice::InProgress => signal,
        Some(b"true") if signal.kind == Kind::Rejected || signal.resend == ResendAdvice::BySafety => {
            signal.with_resend(ResendAdvice::Allowed)
        }
        _ => signal,
    }
}
