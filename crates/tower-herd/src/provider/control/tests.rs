use super::*;

const MS: u64 = 1_000_000;

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn t(n: u64) -> Time {
    Time::from_nanos(n * MS)
}

/// Admits at the first instant it may, at or after `now`.
fn force(c: &mut Control, now: &mut Time, busy: u32) -> Admitted {
    loop {
        match c.admit(*now, busy, 1) {
            Ok(a) => return a,
            Err(BlockedUntil(Some(at))) => {
                assert!(at > *now);
                *now = at;
            }
            Err(BlockedUntil(None)) => panic!("full at {busy}: {c:?}"),
        }
    }
}

fn fill(c: &mut Control, now: &mut Time, from: u32, to: u32) -> Vec<Admitted> {
    (from..to).map(|b| force(c, now, b)).collect()
}

#[test]
fn starts_at_ten_and_grows_only_when_it_is_what_limits() {
    let mut c = Control::new(Settings::default());
    let mut now = t(1);
    let calls = fill(&mut c, &mut now, 0, 10);
    assert_eq!(c.admit(t(2000), 10, 1), Err(BlockedUntil(None)));
    c.on_success(t(2000), calls[0], 10, 1, Some(ms(1000)), None);
    assert_eq!(c.ceiling(), 10 + GROW);
    c.on_success(t(2000), calls[1], 9, 0, Some(ms(1000)), None);
    assert_eq!(c.ceiling(), 10 + GROW, "not full, so it is not what limits");
}

#[test]
fn one_refusal_tells_the_limit_and_the_second_only_sharpens_it() {
    let mut c = Control::new(Settings { start: 30, ..Settings::default() });
    let mut now = t(1);
    let calls = fill(&mut c, &mut now, 0, 23);
    // 20 are served, 21st to 23rd are refused
    c.on_throttled(now.saturating_add(ms(5)), calls[20], 23, Some(ms(1000)));
    assert_eq!((c.ceiling(), c.limit()), (20, Some(20)));
    c.on_throttled(now.saturating_add(ms(6)), calls[21], 22, Some(ms(1000)));
    c.on_throttled(now.saturating_add(ms(7)), calls[22], 21, Some(ms(1000)));
    assert_eq!((c.ceiling(), c.limit()), (20, Some(20)), "calls about to be refused fool nobody");
}

#[test]
fn a_hundred_refusals_are_one_cut() {
    let mut c = Control::new(Settings { max: Some(100), ..Settings::default() });
    let mut now = t(1);
    let calls = fill(&mut c, &mut now, 0, 100);
    for (i, a) in calls.iter().enumerate().skip(50) {
        c.on_throttled(now.saturating_add(ms(5)), *a, 150 - i as u32, Some(ms(1000)));
    }
    assert_eq!(c.ceiling(), 50);
}

#[test]
fn refused_with_nothing_in_service_says_nothing_about_concurrency() {
    let mut c = Control::new(Settings::default());
    let a = c.admit(t(1), 0, 1000).unwrap();
    c.on_throttled(t(6), a, 1, Some(ms(30_000)));
    assert_eq!((c.ceiling(), c.limit()), (10, None));
    assert_eq!(c.admit(t(30_005), 0, 1000), Err(BlockedUntil(Some(t(30_006)))), "never early");
}

#[test]
fn the_backlog_of_an_unknown_provider_leaves_evenly_over_half_the_hint() {
    let mut c = Control::new(Settings::default());
    let a = c.admit(t(1), 0, 1000).unwrap();
    c.on_throttled(t(6), a, 1, Some(ms(30_000)));
    let (mut now, mut sent) = (t(30_006), vec![]);
    for left in (0..1000).rev() {
        loop {
            match c.admit(now, 0, left + 1) {
                Ok(a) => {
                    sent.push(now);
                    c.on_success(now, a, 1, left, Some(ms(200)), None);
                    break;
                }
                Err(BlockedUntil(at)) => now = at.unwrap(),
            }
        }
    }
    let last = sent[999].saturating_since(t(30_006));
    assert!(last <= ms(15_000) && last >= ms(13_000), "{last:?}");
    assert!(sent.windows(9).all(|w| w[8].saturating_since(w[0]) >= ms(100)));
}

#[test]
fn a_release_is_bounded_by_what_is_really_in_service() {
    let mut c = Control::new(Settings { max: Some(100), ..Settings::default() });
    let mut now = t(1);
    let calls = fill(&mut c, &mut now, 0, 100);
    c.on_success(now, calls[0], 100, 0, Some(ms(1000)), None);
    now = now.saturating_add(ms(1));
    // the quota fell to 20: the next is refused though 99 were fine a moment ago
    let a = Admitted { stamp: 0, rank: 100, nth: 0, at: now, first: false };
    c.on_throttled(now.saturating_add(ms(5)), a, 100, Some(ms(1000)));
    for (i, call) in calls.iter().enumerate().skip(12) {
        c.on_success(now.saturating_add(ms(500)), *call, 111 - i as u32, 9, None, None);
    }
    let start = now.saturating_add(ms(1005));
    let mut at = start;
    let sent: Vec<Time> = (12..20).map(|b| force(&mut c, &mut at, b).at).collect();
    assert!(sent.windows(5).all(|w| w[4].saturating_since(w[0]) >= ms(100)), "{sent:?}");
    assert_eq!(sent[0], start, "not later than it must");
}

#[test]
fn bare_refusals_double_up_to_the_cap_and_a_success_resets() {
    let mut c = Control::new(Settings::default());
    let mut now = t(1);
    for want in [1, 2, 4, 8, 16, 30, 30] {
        let a = force(&mut c, &mut now, 0);
        c.on_throttled(now, a, 1, None);
        assert_eq!(c.paused_until(now), Some(now.saturating_add(Duration::from_secs(want))));
    }
    let a = force(&mut c, &mut now, 0);
    c.on_success(now, a, 1, 0, Some(ms(10)), None);
    let a = force(&mut c, &mut now, 0);
    c.on_throttled(now, a, 1, None);
    assert_eq!(c.paused_until(now), Some(now.saturating_add(ms(1000))));
}

/// Discovers a limit of 20; returns the instant after which it may probe.
fn at_twenty() -> (Control, Time) {
    let mut c = Control::new(Settings { start: 30, ..Settings::default() });
    let mut now = t(1);
    let calls = fill(&mut c, &mut now, 0, 21);
    c.on_success(now, calls[0], 21, 1, Some(ms(1000)), None);
    c.on_throttled(now.saturating_add(ms(5)), calls[20], 21, Some(ms(1000)));
    now = now.saturating_add(ms(5));
    assert_eq!(c.ceiling(), 20);
    let probe = now.saturating_add(ms(21_000));
    // the release is over when all are in flight again
    let mut at = now;
    fill(&mut c, &mut at, 0, 20);
    assert_eq!(c.admit(at.saturating_add(ms(5000)), 20, 1), Err(BlockedUntil(None)), "holds");
    (c, probe)
}

#[test]
fn probes_are_rare_single_and_rarer_when_they_fail() {
    let (mut c, probe) = at_twenty();
    assert_eq!(c.admit(probe.saturating_sub(Duration::from_nanos(MS)), 20, 5), Err(BlockedUntil(None)));
    let a = c.admit(probe, 20, 5).unwrap();
    assert_eq!(a.rank, 21);
    assert!(matches!(c.admit(probe, 21, 5), Err(BlockedUntil(Some(_)))), "one at a time");
    c.on_throttled(probe.saturating_add(ms(5)), a, 21, Some(ms(1000)));
    assert_eq!(c.ceiling(), 20);
    let mut at = probe.saturating_add(ms(1005));
    fill(&mut c, &mut at, 0, 20);
    let next = probe.saturating_add(ms(5 + 1000 + 40_000));
    assert_eq!(c.admit(next.saturating_sub(Duration::from_nanos(MS)), 20, 5), Err(BlockedUntil(None)));
    assert!(c.admit(next, 20, 5).is_ok(), "twice as long");
}

#[test]
fn accepted_probes_double_the_step() {
    let (mut c, mut now) = at_twenty();
    let mut busy = 20;
    let start = now;
    while busy < 100 {
        force(&mut c, &mut now, busy);
        busy += 1;
    }
    assert!(now.saturating_since(start) < ms(3000), "{:?}", now.saturating_since(start));
    assert!(c.limit().unwrap() > 50);
}

#[test]
fn a_lost_probe_is_no_verdict() {
    let (mut c, probe) = at_twenty();
    let a = c.admit(probe, 20, 5).unwrap();
    c.on_failed(probe.saturating_add(ms(1)), a, 21);
    assert_eq!(c.limit(), Some(20));
    assert!(c.admit(probe.saturating_add(ms(500)), 20, 5).is_ok());
}

#[test]
fn headers_tell_the_rate() {
    let mut c = Control::new(Settings::default());
    let mut now = t(1);
    let calls = fill(&mut c, &mut now, 0, 10);
    // 20 a second, bucket of 20, ten gone
    let h = LimitHeaders { limit: 20, remaining: 10, reset: ms(500), resolution: ms(1) };
    c.on_success(now, calls[9], 10, 50, Some(ms(1000)), Some(h));
    let gap = c.pace_gap().unwrap();
    assert!(gap >= ms(49) && gap <= ms(56), "{gap:?}: what is missing is more than nine and at most ten");
    let from = now;
    let mut n = 0;
    while now.saturating_since(from) < ms(10_000) {
        force(&mut c, &mut now, 5);
        n += 1;
    }
    assert!((180..=211).contains(&n), "{n}");
}

#[test]
fn the_maximum_holds() {
    let mut c = Control::new(Settings { max: Some(4), ..Settings::default() });
    assert_eq!(c.ceiling(), 4);
    let mut now = t(1);
    let calls = fill(&mut c, &mut now, 0, 4);
    c.on_success(now, calls[0], 4, 9, Some(ms(10)), None);
    assert_eq!(c.ceiling(), 4);
    assert_eq!(c.admit(now.saturating_add(ms(900_000)), 4, 9), Err(BlockedUntil(None)));
}

#[test]
fn an_operators_pause_is_merged_by_maximum_and_cleared() {
    let mut c = Control::new(Settings::default());
    c.pause(t(0), t(10_000));
    c.pause(t(0), t(5_000));
    assert_eq!(c.paused_until(t(1)), Some(t(10_000)));
    assert!(c.estimate_wait(t(1), 0, 0) >= ms(9_999));
    c.pause_clear(t(100));
    assert!(c.admit(t(100), 0, 1).is_ok());
    c.pause(t(0), Time::MAX);
    assert_eq!(c.paused_until(t(100)), Some(t(24 * 3_600_000)));
}

/// The laws, over random histories: never in a pause, never above the ceiling or the maximum,
/// always an instant in the future when blocked, and never stuck.
#[test]
fn laws_hold_over_random_histories() {
    for seed in 1..400u64 {
        let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut rnd = move |n: u64| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 11) % n
        };
        let max = (rnd(3) == 0).then(|| 1 + rnd(40) as u32);
        let mut c = Control::new(Settings { max, ..Settings::default() });
        let mut now = t(1);
        let mut flying: Vec<Admitted> = vec![];
        let mut paused = Time::ZERO;
        for _ in 0..600 {
            let busy = flying.len() as u32;
            if rnd(2) == 0 || flying.is_empty() {
                match c.admit(now, busy, 1 + rnd(50) as usize) {
                    Ok(a) => {
                        assert!(now >= paused, "seed {seed}: early");
                        assert!(busy < c.ceiling() && max.is_none_or(|m| busy < m), "seed {seed}: over");
                        assert_eq!(a.rank, busy + 1);
                        flying.push(a);
                    }
                    Err(BlockedUntil(Some(at))) => {
                        assert!(at > now, "seed {seed}: asks to be asked in the past");
                        now = if rnd(3) == 0 { at } else { now.saturating_add(ms(rnd(20))) };
                    }
                    Err(BlockedUntil(None)) => assert!(!flying.is_empty(), "seed {seed}: stuck {c:?}"),
                }
                continue;
            }
            let a = flying.swap_remove(rnd(flying.len() as u64) as usize);
            let hint = match rnd(4) {
                0 => None,
                1 => Some(Duration::ZERO),
                2 => Some(ms(rnd(60_000))),
                _ => Some(Duration::from_nanos(rnd(u64::MAX))),
            };
            match rnd(9) {
                0 | 1 => {
                    // a hint of centuries is cut to a day; keep the history moving
                    let hint = hint.filter(|h| *h < ms(100_000));
                    c.on_throttled(now, a, busy, hint);
                    paused = paused.max(now.saturating_add(hint.unwrap_or(ms(1000))));
                }
                2 | 3 => c.on_failed(now, a, busy),
                4 => {
                    let h = LimitHeaders {
                        limit: rnd(100),
                        remaining: rnd(120),
                        reset: ms(rnd(5000)),
                        resolution: ms(rnd(1000)),
                    };
                    c.on_success(now, a, busy, rnd(3) as usize, None, (rnd(8) == 0).then_some(h));
                }
                _ => c.on_success(now, a, busy, rnd(3) as usize, Some(ms(rnd(3000))), None),
            }
            assert!(c.ceiling() >= 1);
            let _ = (c.estimate_wait(now, rnd(u64::MAX) as usize, busy), c.fast_cap(), c.watches());
            now = now.saturating_add(ms(rnd(200)));
        }
    }
}

/// A provider that serves `slots` calls at once, each for a second, and puts the same header on each
/// reply; so many are served in a minute, with a hundred callers.
fn served_in_a_minute(slots: u32, header: Option<LimitHeaders>) -> u32 {
    let mut c = Control::new(Settings::default());
    let (mut now, mut served) = (t(1), 0);
    // (end, call, whether it is refused)
    let mut flying: Vec<(Time, Admitted, bool)> = vec![];
    while now < t(60_000) {
        let busy = flying.len() as u32;
        let at = match c.admit(now, busy, 100 - busy as usize) {
            Ok(call) => {
                let refused = flying.iter().filter(|f| !f.2).count() as u32 >= slots;
                flying.push((now.saturating_add(ms(if refused { 5 } else { 1000 })), call, refused));
                continue;
            }
            Err(BlockedUntil(at)) => at.unwrap_or(Time::MAX),
        };
        let (next, &(end, call, refused)) =
            flying.iter().enumerate().min_by_key(|(_, f)| f.0).unwrap_or((0, &(Time::MAX, PROBE, false)));
        now = at.min(end);
        if end <= at {
            match refused {
                true => c.on_throttled(now, call, busy, Some(ms(1000))),
                false => {
                    c.on_success(now, call, busy, 50, Some(ms(1000)), header);
                    served += 1;
                }
            }
            flying.swap_remove(next);
        }
    }
    served
}

const PROBE: Admitted = Admitted { stamp: 0, rank: 0, nth: 0, at: Time::ZERO, first: false };

#[test]
fn headers_that_lie_do_not_make_a_provider_slow() {
    let honest = served_in_a_minute(20, None);
    assert!(honest > 1000, "{honest}");
    let second = Duration::from_secs(1);
    for (limit, remaining, reset, resolution) in [
        // generous
        (10_000, 9_999, second, ms(1)),
        (10_000, 9_999, second * 3600, second),
        (1_000_000, 1_000_000, Duration::ZERO, ms(1)),
        // tiny: about something else
        (1, 0, second * 60, second),
        (2, 1, second * 60, ms(1)),
        (5, 0, second * 60, ms(1)),
        (5, 5, second * 60, ms(1)),
        // nonsense
        (0, 0, second, ms(1)),
        (3, 17, second, ms(1)),
        (10, 5, Duration::MAX, second),
        (10, 0, Duration::ZERO, second),
        (20, 20, second * 10, second),
        (20, 19, second * 30, ms(1)),
    ] {
        let header = LimitHeaders { limit, remaining, reset, resolution };
        let served = served_in_a_minute(20, Some(header));
        assert!(served * 10 >= honest * 8, "{header:?}: {served}, without {honest}");
    }
    // Such a bucket may well be: it is believed, then tried, or outgrown.
    for (limit, remaining, reset, resolution) in [
        (20, 0, second * 60, ms(1)),
        (50, 0, second * 60, ms(1)),
        (20, 0, second * 3600, ms(1)),
        (20, 10, second, second * 2),
    ] {
        let header = LimitHeaders { limit, remaining, reset, resolution };
        let served = served_in_a_minute(20, Some(header));
        assert!(served * 3 >= honest, "{header:?}: {served}, without {honest}");
    }
}

/// Learned or told, a pace is kept to within the grain of the timers, which are a millisecond late.
#[test]
fn a_late_timer_costs_no_throughput() {
    for per_second in [3, 70, 500, 900] {
        let mut c = Control::new(Settings::default());
        let gap = 1_000_000_000 / per_second;
        c.pace = Some(Pace::new(gap, 1, t(1), Source::Learned));
        c.probe_at = Time::MAX;
        let (mut now, mut admitted) = (t(1), 0);
        while now < t(10_001) {
            match c.admit(now, 5, 50) {
                Ok(_) => admitted += 1,
                // rounded up to the next millisecond, as tokio does
                Err(BlockedUntil(at)) => now = Time::from_nanos(at.unwrap().as_nanos().div_ceil(MS) * MS),
            }
        }
        let wanted = per_second * 10;
        assert!(admitted * 100 >= wanted * 99 && admitted <= wanted + 10, "{per_second}: {admitted} in 10 s");
    }
}
