//! What the headers of a request say, and how it is said: pure, over bytes that others chose.

#[cfg(feature = "herd")]
use crate::{Provider, observe::Event};
use crate::{Task, http::grpc};
use http::{HeaderMap, HeaderName, HeaderValue, Version, header::CONTENT_TYPE};
use std::{fmt, io::Write, time::Duration};
use tokio::time::Instant;

/// Our own header, a dictionary of RFC 9651: `made=1, left=2, ms=15000`. Each member may be left out,
/// unknown ones are passed over.
pub const HEADER: HeaderName = HeaderName::from_static("tower-herd-attempts");
const GRPC: HeaderName = HeaderName::from_static("grpc-previous-rpc-attempts");
const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
const ENVOY: HeaderName = HeaderName::from_static("x-envoy-attempt-count");
const ENVOY_TIMEOUT: HeaderName = HeaderName::from_static("x-envoy-expected-rq-timeout-ms");

/// More calls than this are counted as so many.
pub const MOST_CALLS: u32 = 1000;
/// A longer time counts as this one.
pub const MOST_TIME: Duration = Duration::from_secs(24 * 3600);

/// What the headers of a request say of the attempts it belongs to.
///
/// ```
/// use tower_herd::attempts::Told;
/// let mut headers = http::HeaderMap::new();
/// headers.insert("tower-herd-attempts", "made=1, left=2, ms=15000".parse()?);
/// headers.insert("grpc-timeout", "5S".parse()?);
/// let told = Told::of(&headers);
/// assert_eq!((told.made, told.left, told.time), (Some(1), Some(2), Some(std::time::Duration::from_secs(5))));
/// # Ok::<(), http::header::InvalidHeaderValue>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Told {
    /// Calls made for it before this one: the most that is told.
    pub made: Option<u32>,
    /// Failed calls that are left, this one included: the least that is told.
    pub left: Option<u32>,
    /// Time that is left: the least that is told.
    pub time: Option<Duration>,
}

impl Told {
    /// Reads all dialects. What cannot be read says nothing; numbers are capped.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Self {
        let mut told = Told::default();
        for member in headers.get_all(HEADER).iter().flat_map(|value| value.as_bytes().split(|b| *b == b','))
        {
            told.member(member);
        }
        for count in headers.get_all(GRPC).iter().filter_map(count) {
            told.had(count);
        }
        if let Some(count) = envoy_count(headers) {
            told.had(count - 1);
        }
        for time in headers.get_all(GRPC_TIMEOUT).iter().filter_map(|value| grpc_timeout(value.as_bytes())) {
            told.within(time);
        }
        // 0: the route has no timeout.
        let millis = headers.get_all(ENVOY_TIMEOUT).iter().filter_map(|value| number(value.as_bytes()));
        for millis in millis.filter(|millis| *millis > 0) {
            told.within(Duration::from_millis(millis));
        }
        told
    }

    /// What the next stack is to be told of the `attempt`-th call (from 1) of a request of this task.
    #[must_use]
    pub fn next(task: Option<&Task>, attempt: u32, now: Instant) -> Self {
        let before = task.and_then(Task::calls_before).unwrap_or(0);
        Told {
            made: Some(before.saturating_add(attempt.saturating_sub(1)).min(MOST_CALLS)),
            left: task.map(|task| task.left().clamp(1, MOST_CALLS)),
            time: task.and_then(Task::deadline_at).map(|at| at.saturating_duration_since(now).min(MOST_TIME)),
        }
    }

    /// The task, narrowed to what is told: neither its allowance nor its time grows.
    #[must_use]
    pub fn narrow(&self, task: Task, now: Instant) -> Task {
        if self.is_empty() {
            return task;
        }
        let deadline = self.time.and_then(|time| now.checked_add(time));
        // Whoever says something has begun to count, at 0 if he does not say.
        task.narrowed(self.left, deadline, self.made.or(Some(0)))
    }

    /// Whether nothing is told.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Told::default()
    }

    /// The value of our own header.
    fn value(&self) -> HeaderValue {
        // Written on the stack, so that the value is the one allocation. The longest that these numbers can make
        // has 57 bytes.
        let mut buffer = [0; 64];
        let mut rest = &mut buffer[..];
        write!(rest, "{self}").expect("it fits");
        let left = rest.len();
        HeaderValue::from_bytes(&buffer[..buffer.len() - left]).expect("letters, digits and punctuation")
    }

    fn member(&mut self, member: &[u8]) {
        let mut halves = member.splitn(2, |byte| *byte == b'=');
        let (Some(key), Some(value)) = (halves.next(), halves.next()) else { return };
        let Some(value) = number(value) else { return };
        match key.trim_ascii() {
            b"made" => self.had(capped(value)),
            b"left" => {
                let left = capped(value);
                self.left = Some(self.left.map_or(left, |known| known.min(left)));
            }
            b"ms" => self.within(Duration::from_millis(value)),
            _ => {}
        }
    }

    fn had(&mut self, calls: u32) {
        self.made = self.made.max(Some(calls));
    }

    fn within(&mut self, time: Duration) {
        let time = time.min(MOST_TIME);
        self.time = Some(self.time.map_or(time, |known| known.min(time)));
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let members = [
            ("made", self.made.map(u64::from)),
            ("left", self.left.map(u64::from)),
            // Rounded down: what is told is never more than what is there.
            ("ms", self.time.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))),
        ];
        let mut separator = "";
        for (key, value) in members {
            if let Some(value) = value {
                write!(f, "{separator}{key}={value}")?;
                separator = ", ";
            }
        }
        Ok(())
    }
}

/// Which dialects a request is told in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dialects {
    pub(super) own: bool,
    pub(super) grpc: bool,
    pub(super) envoy: bool,
}

impl Dialects {
    /// Writes, and overwrites what another hop has left there.
    pub(super) fn write(self, headers: &mut HeaderMap, told: &Told, attempt: u32) {
        if self.own {
            headers.insert(HEADER, told.value());
        }
        // Both count the calls of one hop. gRPC's says nothing on a first one.
        if self.grpc && is_grpc(headers) {
            match attempt {
                0 | 1 => drop(headers.remove(GRPC)),
                _ => drop(headers.insert(GRPC, (attempt - 1).into())),
            }
        }
        if self.envoy {
            let count = match attempt {
                0 | 1 => HeaderValue::from_static("1"),
                2 => HeaderValue::from_static("2"),
                _ => attempt.into(),
            };
            headers.insert(ENVOY, count);
        }
    }
}

pub(super) fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(grpc::CONTENT_TYPE))
}

/// How many calls a reply says were made of ours, this one included. On the way of every call: one look, and on
/// HTTP/2 a second one for gRPC.
#[inline]
pub(super) fn calls_told(version: Version, headers: &HeaderMap) -> Option<u32> {
    let envoy = headers.get(ENVOY).and_then(|_| envoy_count(headers));
    if version != Version::HTTP_2 {
        return envoy;
    }
    envoy.max(headers.get(GRPC).and_then(count).map(|before| before + 1))
}

/// Reports retries between us and `provider`, if the reply to a first call tells of some.
#[cfg(feature = "herd")]
#[cold]
#[inline(never)]
pub(crate) fn notice(provider: &Provider, version: Version, headers: &HeaderMap) {
    if let Some(calls) = calls_told(version, headers).filter(|calls| *calls > 1)
        && provider.notes_inner_retries()
    {
        provider.observe(|| Event::InnerRetries { provider: provider.name(), attempts: calls });
    }
}

/// Tells who called us how many calls something between us has made of one of theirs.
pub(super) fn tell_back(headers: &mut HeaderMap, calls: u32) {
    if !headers.contains_key(ENVOY) {
        headers.insert(ENVOY, calls.into());
    }
}

/// Takes that away again.
pub(super) fn forget(headers: &mut HeaderMap) {
    headers.remove(ENVOY);
}

/// Envoy counts from 1.
pub(super) fn envoy_count(headers: &HeaderMap) -> Option<u32> {
    headers.get_all(ENVOY).iter().filter_map(count).max().filter(|count| *count > 0)
}

fn count(value: &HeaderValue) -> Option<u32> {
    number(value.as_bytes()).map(capped)
}

fn capped(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX).min(MOST_CALLS)
}

/// Digits and nothing else; those that do not fit saturate.
fn number(value: &[u8]) -> Option<u64> {
    let digits = value.trim_ascii();
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let add = |sum: u64, digit: &u8| sum.saturating_mul(10).saturating_add(u64::from(digit - b'0'));
    Some(digits.iter().fold(0, add))
}

/// At most eight digits and a unit (gRPC over HTTP/2).
fn grpc_timeout(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.trim_ascii().split_last()?;
    let amount = number(digits).filter(|_| digits.len() <= 8)?;
    Some(match unit {
        b'H' => Duration::from_secs(amount * 3600),
        b'M' => Duration::from_secs(amount * 60),
        b'S' => Duration::from_secs(amount),
        b'm' => Duration::from_millis(amount),
        b'u' => Duration::from_micros(amount),
        b'n' => Duration::from_nanos(amount),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| {
                (HeaderName::from_static(name), HeaderValue::from_bytes(value.as_bytes()).unwrap())
            })
            .collect()
    }

    fn of(pairs: &[(&'static str, &str)]) -> (Option<u32>, Option<u32>, Option<u64>) {
        let told = Told::of(&headers(pairs));
        (told.made, told.left, told.time.map(|time| time.as_millis() as u64))
    }

    #[test]
    fn each_dialect() {
        const OWN: &str = "tower-herd-attempts";
        assert_eq!(of(&[]), (None, None, None));
        assert_eq!(of(&[(OWN, "made=1, left=2, ms=15000")]), (Some(1), Some(2), Some(15_000)));
        assert_eq!(of(&[(OWN, "ms=5,new=7;x, left = 3 ")]), (None, Some(3), Some(5)));
        assert_eq!(of(&[("grpc-previous-rpc-attempts", "2")]), (Some(2), None, None));
        assert_eq!(of(&[("x-envoy-attempt-count", "3")]), (Some(2), None, None));
        assert_eq!(of(&[("x-envoy-attempt-count", "1")]), (Some(0), None, None));
        for (timeout, millis) in
            [("1H", 3_600_000), ("2M", 120_000), ("5S", 5000), ("100m", 100), ("5000u", 5)]
        {
            assert_eq!(of(&[("grpc-timeout", timeout)]), (None, None, Some(millis)), "{timeout}");
        }
        assert_eq!(Told::of(&headers(&[("grpc-timeout", "9n")])).time, Some(Duration::from_nanos(9)));
        assert_eq!(of(&[("x-envoy-expected-rq-timeout-ms", "250")]), (None, None, Some(250)));
    }

    #[test]
    fn of_several_the_narrowest() {
        let all = [
            ("tower-herd-attempts", "made=1, left=5, ms=9000, left=2"),
            ("x-envoy-attempt-count", "4"),
            ("grpc-previous-rpc-attempts", "2"),
            ("grpc-timeout", "8S"),
            ("x-envoy-expected-rq-timeout-ms", "7000"),
        ];
        assert_eq!(of(&all), (Some(3), Some(2), Some(7000)));
    }

    #[test]
    fn garbage_says_nothing_and_numbers_are_capped() {
        for garbage in [
            "", " ", "-1", "+1", "1.5", "0x1", "1e9", "\u{fc}", "one", "1 2", "=", "made", "made=", "left==1",
        ] {
            for name in
                ["tower-herd-attempts", "grpc-previous-rpc-attempts", "x-envoy-attempt-count", "grpc-timeout"]
            {
                assert_eq!(of(&[(name, garbage)]), (None, None, None), "{name}: {garbage}");
            }
        }
        assert_eq!(of(&[("grpc-timeout", "123456789S")]), (None, None, None), "nine digits");
        assert_eq!(of(&[("x-envoy-attempt-count", "0")]), (None, None, None));
        assert_eq!(of(&[("x-envoy-expected-rq-timeout-ms", "0")]), (None, None, None), "no timeout");
        let day = MOST_TIME.as_millis() as u64;
        assert_eq!(of(&[("grpc-timeout", "99999999H")]), (None, None, Some(day)));
        let huge = "9".repeat(400);
        assert_eq!(
            of(&[("tower-herd-attempts", &format!("made={huge}, left={huge}, ms={huge}"))]),
            (Some(1000), Some(1000), Some(day))
        );
        assert_eq!(of(&[("x-envoy-attempt-count", &huge)]), (Some(999), None, None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_came_was_allowed_to_come() {
        let now = Instant::now();
        let task =
            Told { left: Some(0), time: Some(Duration::ZERO), ..Told::default() }.narrow(Task::new(1), now);
        assert_eq!((task.left(), task.deadline_at()), (1, Some(now)));
        assert_eq!(task.calls_before(), Some(0), "it was told something, so what is left is told on");
        let own = Task::new(1);
        let told = Told { left: Some(9), made: Some(0), ..Told::default() };
        let task = told.narrow(own.clone(), now);
        assert_eq!((task.left(), task.calls_before(), task.id()), (3, Some(0), own.id()));
        assert!(Told::default().narrow(own.clone(), now).is(&own), "nothing told, nothing changed");
    }

    /// Values that look like those of the dialects, and any bytes.
    fn value() -> impl Strategy<Value = HeaderValue> {
        let like = "(made|left|ms| |,|=|[0-9]{1,30}|[HMSmun]|-){0,12}".prop_map(String::into_bytes);
        prop_oneof![like, proptest::collection::vec(any::<u8>(), 0..40)]
            .prop_filter_map("no header", |bytes| HeaderValue::from_bytes(&bytes).ok())
    }

    fn any_headers() -> impl Strategy<Value = HeaderMap> {
        let names =
            prop::sample::select(vec![HEADER, GRPC, GRPC_TIMEOUT, ENVOY, ENVOY_TIMEOUT, CONTENT_TYPE]);
        proptest::collection::vec((names, value()), 0..8).prop_map(|pairs| {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                headers.append(name, value);
            }
            headers
        })
    }

    proptest! {
        #[test]
        fn any_headers_are_read_within_bounds(mut headers in any_headers(), attempt in any::<u32>()) {
            let told = Told::of(&headers);
            prop_assert!(told.made.is_none_or(|calls| calls <= MOST_CALLS));
            prop_assert!(told.left.is_none_or(|calls| calls <= MOST_CALLS));
            prop_assert!(told.time.is_none_or(|time| time <= MOST_TIME));
            prop_assert!(calls_told(Version::HTTP_2, &headers).is_none_or(|calls| (1..=MOST_CALLS + 1).contains(&calls)));
            // What is written is read again, to the millisecond.
            let own: HeaderMap = [(HEADER, told.value())].into_iter().collect();
            let whole = told.time.map(|time| Duration::from_millis(time.as_millis() as u64));
            prop_assert_eq!(Told::of(&own), Told { time: whole, ..told });
            Dialects { own: true, grpc: true, envoy: true }.write(&mut headers, &told, attempt);
            prop_assert!(Told::of(&headers).made >= told.made);
        }

        /// Law 3 over nested stacks: through services that each have spent something, hold the task elsewhere,
        /// wait, and hear from others, neither what is left nor the deadline ever grows.
        #[test]
        fn neither_allowance_nor_time_grows_inward(
            first in (1..20u32, 0..100_000u64),
            hops in proptest::collection::vec(
                (any_headers(), 0..5u32, any::<bool>(), 1..5u32, 0..20_000u64, 1..20u32, 0..200_000u64), 1..8),
        ) {
            let mut now = Instant::now();
            let mut task = Task::new(1).allowance(first.0).deadline(now + Duration::from_millis(first.1));
            for (mut headers, spent, shared, attempt, waits, own_left, own_millis) in hops {
                (0..spent).for_each(|_| { task.charge(); });
                now += Duration::from_millis(waits);
                let (left, deadline, before) = (task.left(), task.deadline_at(), task.calls_before());
                // The same task further in, in one process ...
                let held = shared.then(|| task.clone());
                let here = Told::of(&headers).narrow(task.clone(), now);
                prop_assert!(here.left() <= left && here.deadline_at() <= deadline);
                prop_assert!(here.calls_before() >= before);
                drop(held);
                // ... and beyond the wire, where another has settings of its own.
                let told = Told::next(Some(&here), attempt, now);
                Dialects { own: true, grpc: true, envoy: true }.write(&mut headers, &told, attempt);
                let theirs = Task::new(2).allowance(own_left).deadline(now + Duration::from_millis(own_millis));
                task = Told::of(&headers).narrow(theirs, now);
                prop_assert!(task.left() <= left.max(1).min(own_left), "{task:?}");
                prop_assert!(task.deadline_at() <= deadline.max(Some(now)), "{task:?}");
                prop_assert!(task.calls_before() >= Some(attempt - 1));
            }
        }
    }
}
