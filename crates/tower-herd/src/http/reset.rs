//! Limit headers: how full each bucket is, and when it is full again.
//!
//! | dialect | names | reset is |
//! |---|---|---|
//! | OpenAI, Groq, Azure | `x-ratelimit-{limit,remaining,reset}-{requests,tokens}` | a Go duration, or seconds |
//! | Anthropic | `anthropic-ratelimit-{requests,input-tokens,..}-{limit,remaining,reset}` | RFC 3339 |
//! | GitHub, X, Okta | `x-ratelimit-*`, `x-rate-limit-*` | epoch seconds: the end of a fixed window |
//! | Discord | the same, and `x-ratelimit-reset-after` | seconds |
//! | Linear | `x-ratelimit-requests-{limit,remaining,reset}` | epoch milliseconds |
//! | Jira | `x-ratelimit-reset` | RFC 3339 without seconds |
//! | IETF | `ratelimit: "name";r=0;t=30`, `ratelimit-policy`; before that `ratelimit-{limit,remaining,reset}` | seconds |
//!
//! Dialects are told apart by form, not by vendor: gateways speak several at once.

use super::{
    dialect::Now,
    value::{When, count},
};
use crate::Quota;
use http::HeaderValue;
use std::time::Duration;

/// More buckets than these in one reply are not looked at.
const BUCKETS: usize = 6;
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// The limit headers of a reply, by bucket. Collected in the one pass over its headers; nothing is
/// parsed before somebody asks.
pub(crate) struct Limits<'a> {
    buckets: [Bucket<'a>; BUCKETS],
    len: usize,
    ietf: Option<&'a HeaderValue>,
    policy: Option<&'a HeaderValue>,
}

#[derive(Clone, Copy)]
struct Bucket<'a> {
    /// The length of the prefix tells the dialect: gateways send their own buckets beside those of
    /// the provider behind them.
    family: u8,
    name: &'a str,
    limit: Option<&'a HeaderValue>,
    remaining: Option<&'a HeaderValue>,
    reset: Option<&'a HeaderValue>,
    unit: Unit,
}

/// Whether the name of the reset header tells its unit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unit {
    Untold,
    Seconds,
    Milliseconds,
}

enum Part {
    Limit,
    Remaining,
    Reset(Unit),
}

impl<'a> Limits<'a> {
    pub(crate) const fn new() -> Self {
        let none =
            Bucket { family: 0, name: "", limit: None, remaining: None, reset: None, unit: Unit::Untold };
        Limits { buckets: [none; BUCKETS], len: 0, ietf: None, policy: None }
    }

    /// Takes a header, if it is about limits.
    pub(crate) fn add(&mut self, name: &'a str, value: &'a HeaderValue) {
        let Some((family, tail)) = family(name) else { return };
        let Some((part, bucket)) = part(tail) else {
            match tail {
                "" => self.ietf = self.ietf.or(Some(value)),
                "-policy" => self.policy = self.policy.or(Some(value)),
                _ => {}
            }
            return;
        };
        let known = &self.buckets[..self.len];
        let at = match known.iter().position(|known| known.family == family && known.name == bucket) {
            Some(at) => at,
            None if self.len < BUCKETS => {
                self.len += 1;
                self.buckets[self.len - 1].family = family;
                self.buckets[self.len - 1].name = bucket;
                self.len - 1
            }
            None => return,
        };
        let bucket = &mut self.buckets[at];
        match part {
            Part::Limit => bucket.limit = bucket.limit.or(Some(value)),
            Part::Remaining => bucket.remaining = bucket.remaining.or(Some(value)),
            // Discord tells the reset twice; the span needs no clock.
            Part::Reset(unit) if bucket.reset.is_none() || unit != Unit::Untold => {
                bucket.reset = Some(value);
                bucket.unit = unit;
            }
            Part::Reset(_) => {}
        }
    }

    /// The wait until the bucket that is empty is full again; of several the longest. Where none is
    /// said to be empty the shortest of all, if `guess`.
    pub(crate) fn wait(&self, now: Now<'_>, guess: bool) -> Option<Duration> {
        let (mut empty, mut other) = (None::<Duration>, None::<Duration>);
        let mut take = |is_empty: bool, wait: Option<Duration>| {
            let Some(wait) = wait else { return };
            if is_empty {
                empty = empty.max(Some(wait));
            } else {
                other = Some(other.map_or(wait, |other| other.min(wait)));
            }
        };
        for bucket in &self.buckets[..self.len] {
            take(bucket.is_empty(), bucket.wait(now));
        }
        if let Some(field) = self.ietf.and_then(|field| ietf(field.as_bytes())) {
            for item in field {
                let wait = item.reset.filter(|reset| *reset > 0 || item.remaining == Some(0));
                take(item.remaining == Some(0), wait.map(Duration::from_secs));
            }
        }
        empty.or(other.filter(|_| guess))
    }

    /// Whether a bucket is empty that is filled once a day or a month, by its name.
    pub(crate) fn is_out_for_long(&self) -> bool {
        self.buckets[..self.len].iter().any(|bucket| bucket.is_empty() && bucket.window() > HOUR)
    }

    /// The quota that binds first: an empty bucket, else requests before tokens.
    pub(crate) fn quota(&self, now: Now<'_>) -> Option<Quota> {
        let mut best: Option<(&Bucket<'_>, u8)> = None;
        for bucket in &self.buckets[..self.len] {
            let rank = bucket.rank();
            if rank > best.map_or(0, |(_, rank)| rank) {
                best = Some((bucket, rank));
            }
        }
        match best {
            Some((bucket, _)) => bucket.quota(now),
            None => self.ietf.and_then(|field| self.ietf_quota(field)),
        }
    }

    #[cold]
    fn ietf_quota(&self, field: &HeaderValue) -> Option<Quota> {
        let item = ietf(field.as_bytes())?.min_by_key(|item| item.remaining.unwrap_or(u64::MAX))?;
        let policy = || {
            ietf(self.policy?.as_bytes())?
                .find(|policy| policy.name == item.name && policy.limit.is_some())?
                .limit
        };
        let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let limit = item.limit.or_else(policy).filter(|limit| *limit > 0)?;
        Some(Quota {
            limit: small(limit),
            remaining: small(item.remaining?),
            reset: Duration::from_secs(item.reset?),
            resolution: SECOND,
            fixed_window: false,
        })
    }
}

impl Bucket<'_> {
    fn is_empty(&self) -> bool {
        self.remaining.is_some_and(|value| {
            value.as_bytes() == b"0" || count(value.as_bytes()).is_some_and(|(_, is_zero)| is_zero)
        })
    }

    /// How well it serves as the quota; 0 where it tells too little.
    #[inline]
    fn rank(&self) -> u8 {
        let (Some(_), Some(remaining), Some(_)) = (self.limit, self.remaining, self.reset) else { return 0 };
        match self.name {
            _ if remaining.as_bytes() == b"0" => 4,
            "" | "-requests" | "requests-" => 3,
            name if name.contains("tokens") => 1,
            _ => 2,
        }
    }

    /// The window that its name tells; limits of unknown window are taken for an hour at most.
    fn window(&self) -> Duration {
        match self.name.split('-').find(|word| matches!(*word, "day" | "daily" | "month" | "monthly")) {
            Some("day" | "daily") => DAY,
            Some(_) => 31 * DAY,
            None => HOUR,
        }
    }

    fn reset(&self) -> Option<When> {
        let text = self.reset?.as_bytes();
        match self.unit {
            Unit::Milliseconds => super::value::millis(text).map(When::Span),
            Unit::Seconds => super::value::seconds(text).map(When::Span),
            // A larger number may as well be milliseconds.
            Unit::Untold => When::parse(text).filter(|when| match when {
                When::Number(span) => *span <= self.window(),
                _ => true,
            }),
        }
    }

    fn wait(&self, now: Now<'_>) -> Option<Duration> {
        let when = self.reset()?;
        let wait = when.wait(|| now.get());
        // Azure's sentinel: a reset of 0 says nothing, unless the bucket is said to be empty.
        let is_sentinel =
            wait.is_zero() && matches!(when, When::Number(_) | When::Span(_)) && !self.is_empty();
        (!is_sentinel).then_some(wait)
    }

    fn quota(&self, now: Now<'_>) -> Option<Quota> {
        let (limit, _) = count(self.limit?.as_bytes())?;
        let (remaining, _) = count(self.remaining?.as_bytes())?;
        let when = self.reset()?;
        if limit == 0 {
            return None;
        }
        let resolution = self.resolution(when);
        let (reset, resolution) = match when {
            When::Number(span) | When::Span(span) => (span, resolution),
            // The difference of two instants, if it is the provider's own clock that told both: ours
            // may be minutes off, and a rate needs better.
            When::Epoch(at) | When::Date(at) => (at.saturating_sub(now.date()?), resolution + SECOND),
        };
        let fixed_window = self.name.is_empty() && matches!(when, When::Epoch(_));
        Some(Quota { limit, remaining, reset, resolution, fixed_window })
    }

    /// The unit in which the reset was told.
    fn resolution(&self, when: When) -> Duration {
        const MILLISECOND: Duration = Duration::from_millis(1);
        let text = self.reset.map_or(&b""[..], |reset| reset.as_bytes());
        match when {
            _ if self.unit == Unit::Milliseconds || text.contains(&b'.') => MILLISECOND,
            // Go writes what it has: `1s` is exact. Beyond a minute providers cut it to seconds.
            When::Span(span) if span < MINUTE && text.ends_with(b"s") => MILLISECOND,
            When::Number(_) | When::Span(_) => SECOND,
            When::Epoch(_) if text.len() > 12 => MILLISECOND,
            When::Epoch(_) => SECOND,
            // RFC 3339 without seconds has one colon before its zone.
            When::Date(_) if text.len() < "2026-01-01T00:00:00".len() => MINUTE,
            When::Date(_) => SECOND,
        }
    }
}

/// The bucket of requests, found in the one pass over the headers of a success. What it cannot tell
/// by itself (another bucket is empty, there is none of requests) takes the full [`Limits`].
#[derive(Default)]
pub(crate) struct Requests<'a> {
    limit: Option<&'a HeaderValue>,
    remaining: Option<&'a HeaderValue>,
    reset: Option<&'a HeaderValue>,
    /// Dialect of the headers above; other dialects beside it set `others`.
    form: u8,
    others: bool,
    any: bool,
}

impl<'a> Requests<'a> {
    /// Takes a header, if it is about limits.
    #[inline]
    pub(crate) fn add(&mut self, name: &'a str, value: &'a HeaderValue) {
        let Some((family, tail)) = family(name) else { return };
        self.any = true;
        let (slot, place) = match tail {
            "-limit-requests" => (&mut self.limit, 1),
            "-remaining-requests" => (&mut self.remaining, 1),
            "-reset-requests" => (&mut self.reset, 1),
            "-requests-limit" => (&mut self.limit, 2),
            "-requests-remaining" => (&mut self.remaining, 2),
            "-requests-reset" => (&mut self.reset, 2),
            "-limit" => (&mut self.limit, 3),
            "-remaining" => (&mut self.remaining, 3),
            "-reset" => (&mut self.reset, 3),
            _ => {
                // What is 0 here may be an empty bucket.
                self.others |= value.as_bytes() == b"0" || tail == "-reset-after";
                return;
            }
        };
        let form = family * 4 + place;
        if slot.is_some() || (self.form != 0 && self.form != form) {
            self.others = true;
            return;
        }
        self.form = form;
        *slot = Some(value);
    }

    /// Whether there are limit headers at all.
    pub(crate) fn any(&self) -> bool {
        self.any
    }

    /// The quota; none if this takes a look at the other buckets.
    #[inline]
    pub(crate) fn quota(&self, now: Now<'_>) -> Option<Quota> {
        if self.others || self.limit.is_none() || self.remaining.is_none() || self.reset.is_none() {
            return None;
        }
        let name = if self.form % 4 == 3 { "" } else { "-requests" };
        let bucket = Bucket {
            family: 0,
            name,
            limit: self.limit,
            remaining: self.remaining,
            reset: self.reset,
            unit: Unit::Untold,
        };
        bucket.quota(now)
    }
}

const X_RATELIMIT: u64 = u64::from_le_bytes(*b"x-rateli");
const X_RATE_LIMIT: u64 = u64::from_le_bytes(*b"x-rate-l");
const ANTHROPIC: u64 = u64::from_le_bytes(*b"anthropi");
const IETF: u64 = u64::from_le_bytes(*b"ratelimi");
const GRPC: u64 = u64::from_le_bytes(*b"grpc-sta");

/// What a header of a success may be about.
pub(crate) enum Glance {
    Other,
    Limits,
    Grpc,
}

/// Eight bytes at once: most headers of a reply are of no interest.
#[inline]
pub(crate) fn glance(name: &str) -> Glance {
    let Some(first) = name.as_bytes().first_chunk() else { return Glance::Other };
    match u64::from_le_bytes(*first) {
        X_RATELIMIT | X_RATE_LIMIT | ANTHROPIC | IETF => Glance::Limits,
        GRPC => Glance::Grpc,
        _ => Glance::Other,
    }
}

/// The dialect that the name of a header starts with, and what follows.
#[inline]
fn family(name: &str) -> Option<(u8, &str)> {
    let prefix = match u64::from_le_bytes(*name.as_bytes().first_chunk()?) {
        X_RATELIMIT => "x-ratelimit",
        X_RATE_LIMIT => "x-rate-limit",
        ANTHROPIC => "anthropic-ratelimit",
        IETF => "ratelimit",
        _ => return None,
    };
    Some((prefix.len() as u8, name.strip_prefix(prefix)?))
}

/// What a header tells of which bucket: the bucket's name comes after (OpenAI) or before (Anthropic).
#[inline]
fn part(tail: &str) -> Option<(Part, &str)> {
    let words = tail.strip_prefix('-')?;
    for (word, part) in
        [("remaining", Part::Remaining), ("reset", Part::Reset(Unit::Untold)), ("limit", Part::Limit)]
    {
        let Some(bucket) = words.strip_prefix(word) else { continue };
        match (part, bucket) {
            (Part::Reset(_), "-after" | "-seconds") => return Some((Part::Reset(Unit::Seconds), "")),
            (Part::Reset(_), "-ms" | "-after-ms") => return Some((Part::Reset(Unit::Milliseconds), "")),
            (part, bucket) if bucket.is_empty() || bucket.starts_with('-') => return Some((part, bucket)),
            _ => return None,
        }
    }
    for (word, part) in
        [("remaining", Part::Remaining), ("reset", Part::Reset(Unit::Untold)), ("limit", Part::Limit)]
    {
        // The dash stays with the name, so that `requests-` is never taken for `-requests`.
        if let Some(bucket) = words.strip_suffix(word).filter(|bucket| bucket.ends_with('-')) {
            return Some((part, bucket));
        }
    }
    None
}

/// One item of an IETF `RateLimit` or `RateLimit-Policy` field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Item<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) remaining: Option<u64>,
    pub(crate) reset: Option<u64>,
    pub(crate) limit: Option<u64>,
}

/// The items of an IETF field: `"default";r=0;t=30`, or of an older draft: `limit=100, remaining=0,
/// reset=30` (one item). None if any of it is malformed: RFC 9651 has such a field ignored whole.
pub(crate) fn ietf(field: &[u8]) -> Option<impl Iterator<Item = Item<'_>>> {
    let field = field.trim_ascii();
    let mut older = None::<Item<'_>>;
    let mut members = 0_usize;
    for member in members_of(field) {
        let member = item(member)?;
        members += 1;
        if let Member::Pair(key, value) = member {
            let older = older.get_or_insert_default();
            match key {
                b"limit" => older.limit = value,
                b"remaining" => older.remaining = value,
                b"reset" => older.reset = value,
                _ => {}
            }
        }
    }
    if members == 0 {
        return None;
    }
    let newer = members_of(field).filter_map(|member| match item(member)? {
        Member::Item(item) => Some(item),
        Member::Pair(..) => None,
    });
    Some(older.into_iter().chain(newer))
}

enum Member<'a> {
    Item(Item<'a>),
    Pair(&'a [u8], Option<u64>),
}

/// Pieces of `text` between separators that stand outside quotes.
fn split(text: &[u8], separator: u8) -> impl Iterator<Item = &[u8]> {
    let mut quoted = false;
    let mut escaped = false;
    text.split(move |byte| {
        if escaped {
            escaped = false;
        } else if *byte == b'\\' && quoted {
            escaped = true;
        } else if *byte == b'"' {
            quoted = !quoted;
        }
        *byte == separator && !quoted
    })
}

fn members_of(field: &[u8]) -> impl Iterator<Item = &[u8]> {
    split(field, b',').map(<[u8]>::trim_ascii)
}

fn item(member: &[u8]) -> Option<Member<'_>> {
    let mut parts = split(member, b';').map(<[u8]>::trim_ascii);
    let head = parts.next()?;
    if let Some(at) = head.iter().position(|byte| *byte == b'=').filter(|_| head[0] != b'"') {
        return Some(Member::Pair(&head[..at], integer(&head[at + 1..])));
    }
    let name = match head {
        [b'"', name @ .., b'"'] => name,
        [first, ..] if first.is_ascii_alphabetic() || *first == b'*' => head,
        _ => return None,
    };
    let mut item = Item { name, ..Item::default() };
    for parameter in parts {
        let (key, value) = match parameter.iter().position(|byte| *byte == b'=') {
            Some(at) => (&parameter[..at], &parameter[at + 1..]),
            None => (parameter, &b""[..]),
        };
        match key {
            b"" => return None,
            b"r" => item.remaining = Some(integer(value)?),
            b"t" => item.reset = Some(integer(value)?),
            b"q" => item.limit = Some(integer(value)?),
            _ => {}
        }
    }
    Some(Member::Item(item))
}

fn integer(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::UNIX_EPOCH;

    fn with<T>(pairs: &[(&str, &str)], ask: impl FnOnce(&Limits<'_>, Now<'_>) -> T) -> T {
        let headers: http::HeaderMap =
            pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
        let mut limits = Limits::new();
        for (name, value) in &headers {
            limits.add(name.as_str(), value);
        }
        let now = Now { headers: &headers, wall: || UNIX_EPOCH + Duration::from_secs(1_700_000_000) };
        ask(&limits, now)
    }

    fn wait(pairs: &[(&str, &str)]) -> Option<u64> {
        with(pairs, |limits, now| limits.wait(now, true)).map(|wait| wait.as_millis() as u64)
    }

    #[test]
    fn the_empty_bucket_binds() {
        for (pairs, expected) in [
            // Several are empty: the longest of those.
            (
                &[
                    ("x-ratelimit-remaining-requests", "0"),
                    ("x-ratelimit-reset-requests", "5s"),
                    ("x-ratelimit-remaining-tokens", "0"),
                    ("x-ratelimit-reset-tokens", "9s"),
                    ("x-ratelimit-remaining-images", "7"),
                    ("x-ratelimit-reset-images", "40s"),
                ][..],
                Some(9000),
            ),
            // None says so: the shortest.
            (&[("x-ratelimit-reset-requests", "5s"), ("x-ratelimit-reset-tokens", "9s")], Some(5000)),
            // openai/openai-python#937
            (&[("x-rate-limit-reset-tokens", "55")], Some(55_000)),
            // openai/openai-dotnet#838
            (&[("x-ratelimit-remaining-tokens", "-1"), ("x-ratelimit-reset-tokens", "0")], None),
            (&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "0")], Some(0)),
            (&[("x-ratelimit-reset", "-3")], None),
            (&[("x-ratelimit-reset", "1699999700")], Some(0)),
            // Seconds or milliseconds? Nobody can tell.
            (&[("x-ratelimit-reset", "30000")], None),
            (&[("x-ratelimit-reset", "3600")], Some(3_600_000)),
            (&[("x-ratelimit-reset-after", "30000")], Some(30_000_000)),
            (&[("x-ratelimit-reset-ms", "30000")], Some(30_000)),
            (&[("x-ratelimit-reset-requests", "20h")], Some(72_000_000)),
            // The name tells that it is about days.
            (
                &[("x-ratelimit-remaining-requests-day", "0"), ("x-ratelimit-reset-requests-day", "33011.4")],
                Some(33_011_400),
            ),
            // Discord: the span needs no clock, and is finer.
            (&[("x-ratelimit-reset", "1700000065"), ("x-ratelimit-reset-after", "64.57")], Some(64_570)),
            // Linear.
            (
                &[("x-ratelimit-requests-remaining", "0"), ("x-ratelimit-requests-reset", "1700000007000")],
                Some(7000),
            ),
            // Reddit.
            (&[("x-ratelimit-remaining", "0.0"), ("x-ratelimit-reset", "287")], Some(287_000)),
            (&[("ratelimit-remaining", "0"), ("ratelimit-reset", "12")], Some(12_000)),
            (&[("ratelimit", "limit=100, remaining=0, reset=5")], Some(5000)),
            (&[("ratelimit", "\"a\";r=3;t=9, \"b,;\";r=0;t=7")], Some(7000)),
            (&[("ratelimit", "default;r=0;t=7")], Some(7000)),
            (&[("ratelimit", "\"a\";r=0;t=x")], None),
            (&[("ratelimit", "\"a\";r=0;t=7, ")], None),
            (&[("x-ratelimit-scope", "user"), ("x-ratelimited", "5"), ("x-ratelimit-resetting", "5")], None),
        ] {
            assert_eq!(wait(pairs), expected, "{pairs:?}");
        }
    }

    #[test]
    fn quotas_of_all_dialects() {
        let quota = |limit, remaining, millis, resolution, fixed_window| {
            let (reset, resolution) = (Duration::from_millis(millis), Duration::from_millis(resolution));
            Some(Quota { limit, remaining, reset, resolution, fixed_window })
        };
        let date = ("date", "Tue, 14 Nov 2023 22:13:20 GMT");
        for (pairs, expected) in [
            (
                &[
                    ("x-ratelimit-limit-tokens", "30000"),
                    ("x-ratelimit-remaining-tokens", "29000"),
                    ("x-ratelimit-reset-tokens", "2s"),
                    ("x-ratelimit-limit-requests", "500"),
                    ("x-ratelimit-remaining-requests", "499"),
                    ("x-ratelimit-reset-requests", "120ms"),
                ][..],
                quota(500, 499, 120, 1, false),
            ),
            (
                &[
                    ("x-ratelimit-limit-requests", "500"),
                    ("x-ratelimit-remaining-requests", "499"),
                    ("x-ratelimit-reset-requests", "120ms"),
                    ("x-ratelimit-limit-tokens", "30000"),
                    ("x-ratelimit-remaining-tokens", "0"),
                    ("x-ratelimit-reset-tokens", "2s"),
                ],
                quota(30_000, 0, 2000, 1, false),
            ),
            (
                &[
                    ("anthropic-ratelimit-requests-limit", "50"),
                    ("anthropic-ratelimit-requests-remaining", "49"),
                    ("anthropic-ratelimit-requests-reset", "2023-11-14T22:13:21Z"),
                    date,
                ],
                quota(50, 49, 1000, 2000, false),
            ),
            // Without the provider's own date nobody knows how far away that is.
            (
                &[
                    ("anthropic-ratelimit-requests-limit", "50"),
                    ("anthropic-ratelimit-requests-remaining", "49"),
                    ("anthropic-ratelimit-requests-reset", "2023-11-14T22:13:21Z"),
                ],
                None,
            ),
            (
                &[
                    ("x-ratelimit-limit", "5000"),
                    ("x-ratelimit-remaining", "4999"),
                    ("x-ratelimit-reset", "1700003600"),
                    ("x-ratelimit-used", "1"),
                    date,
                ],
                quota(5000, 4999, 3_600_000, 2000, true),
            ),
            (
                &[("ratelimit", "\"d\";r=7;t=30"), ("ratelimit-policy", "\"x\";q=9, \"d\";q=100;w=60")],
                quota(100, 7, 30_000, 1000, false),
            ),
            (&[("ratelimit", "limit=100, remaining=3, reset=5")], quota(100, 3, 5000, 1000, false)),
            (
                &[
                    ("ratelimit-limit", "100, 100;w=60"),
                    ("ratelimit-remaining", "3"),
                    ("ratelimit-reset", "5"),
                ],
                quota(100, 3, 5000, 1000, false),
            ),
            // Azure's sentinels, and what is incomplete, are no quota.
            (
                &[
                    ("x-ratelimit-limit-tokens", "-1"),
                    ("x-ratelimit-remaining-tokens", "-1"),
                    ("x-ratelimit-reset-tokens", "0"),
                ],
                None,
            ),
            (&[("x-ratelimit-limit", "5"), ("x-ratelimit-remaining", "4")], None),
            (&[("ratelimit", "\"d\";r=7;t=30")], None),
        ] {
            #[expect(clippy::redundant_closure_for_method_calls, reason = "the method is not general enough")]
            let quota = with(pairs, |limits, now| limits.quota(now));
            assert_eq!(quota, expected, "{pairs:?}");
        }
    }

    proptest! {
        // The quick look may decline, and never disagrees.
        #[test]
        fn the_quick_look_agrees_with_the_full_one(pairs in proptest::collection::vec(
            ("(x-ratelimit|x-rate-limit|anthropic-ratelimit|ratelimit)(-(limit|remaining|reset)(-(requests|tokens|after))?|-(requests|tokens)-(limit|remaining|reset))",
             "0|-1|[1-9]{1,3}|[1-9]s|17000000[0-9]{2}|2023-11-14T22:14Z"), 0..9))
        {
            let headers: http::HeaderMap =
                pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
            let (mut limits, mut requests) = (Limits::new(), Requests::default());
            for (name, value) in &headers {
                limits.add(name.as_str(), value);
                requests.add(name.as_str(), value);
            }
            let now = Now { headers: &headers, wall: || UNIX_EPOCH + Duration::from_secs(1_700_000_000) };
            if let Some(quota) = requests.quota(now) {
                prop_assert_eq!(Some(quota), limits.quota(now));
            }
        }
    }

    proptest! {
        #[test]
        fn no_field_panics(field in proptest::collection::vec(any::<u8>(), 0..60), near in "[\"a-z0-9;=,\\\\ ]{0,40}") {
            let _ = ietf(&field).map(Iterator::count);
            let _ = ietf(near.as_bytes()).map(Iterator::count);
        }

        #[test]
        fn no_set_of_limit_headers_panics(pairs in proptest::collection::vec(
            ("(x-ratelimit|x-rate-limit|anthropic-ratelimit|ratelimit)(-(limit|remaining|reset|requests|tokens|after|ms|day|policy)){0,3}",
             "[-0-9.:TZhms\" ;=rtq]{0,24}"), 0..12))
        {
            let pairs: Vec<(&str, &str)> = pairs.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            with(&pairs, |limits, now| { let _ = (limits.wait(now, true), limits.quota(now), limits.is_out_for_long()); });
        }
    }
}
