//! Worlds, by their seed.

use super::{
    judge::At,
    process::{Load, Stop},
    world::{Fault, Plan, SECOND, Without},
};
use fastrand::Rng;
use std::time::Duration;
use tower_herd::store::{FleetSettings, Outage};

/// For so long faults begin.
const FAULTS: At = 22 * SECOND;

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// How calls of this world are, and nothing else.
fn plan(rng: &mut Rng, longest: Duration) -> Plan {
    let processes = rng.usize(3..=6);
    let ceiling = [3, 5, 8, 12, 12, 20][rng.usize(..6)];
    // The defaults, and what is as short as it may be: more happens in the same time.
    let (ttl, gap, renew) = if rng.u32(..5) == 0 { (10_000, 3000, 1000) } else { (4000, 1500, 600) };
    let (ttl, gap, renew) = (millis(ttl), millis(gap), millis(renew));
    let usual = millis(rng.u64(300..2500));
    let mean = 0.4 * usual.as_secs_f64() + 0.1 * longest.as_secs_f64();
    let full = f64::from(ceiling) / mean / processes as f64;
    let load = [0.9, 1.5, 2.5][rng.usize(..3)];
    let settings = FleetSettings::new().ttl(ttl).gap(gap).renew(renew).outage(Outage::Stop);
    Plan {
        processes,
        ceiling,
        ttl,
        gap,
        extra: Duration::ZERO,
        grace: Duration::ZERO,
        settings,
        load: Load { rate: load * full, steady: 2.5 * full, longest, usual, given_up: 50 },
        lost: 30,
        late: 20,
        twice: 50,
        wakes_lost: 100,
        mixed_up: 500,
        drift: 1000,
        faults: Vec::new(),
        without: Without::default(),
    }
}

fn faults(rng: &mut Rng, plan: &mut Plan, kinds: &[Fault]) -> At {
    // All begins with a time of learning, in which nothing much can go wrong.
    let begin = At::try_from((plan.ttl + plan.extra).as_nanos()).unwrap_or(0) + 2 * SECOND;
    for _ in 0..rng.u32(4..9) {
        let at = begin + rng.u64(..FAULTS);
        let fault = match kinds[rng.usize(..kinds.len())] {
            Fault::Step(sign) => {
                let by = [500, 900, 2000, 2900, 5000, 12_000, 60_000, 3_600_000][rng.usize(..8)];
                Fault::Step(sign * by)
            }
            Fault::Cut { .. } => {
                let (says, hears) = [(true, true), (true, false), (false, true)][rng.usize(..3)];
                Fault::Cut { says, hears }
            }
            Fault::Freeze { .. } => Fault::Freeze { catches_up: rng.bool() },
            fault => fault,
        };
        plan.faults.push((at, fault));
    }
    begin + FAULTS
}

const STORE: [Fault; 7] = [
    Fault::Outage,
    Fault::Flush,
    Fault::Restart,
    Fault::Promote,
    Fault::Step(1),
    Fault::Step(-1),
    Fault::Freeze { catches_up: false },
];
const STOPS: [Fault; 5] = [
    Fault::Stopped(Stop::Process),
    Fault::Stopped(Stop::Machine),
    Fault::Cut { says: true, hears: true },
    Fault::Cut { says: true, hears: true },
    Fault::Orphan,
];

/// What the first two rows of the table promise: calls may take longer than the ttl.
pub fn unkind(seed: u64) -> (Plan, At) {
    let mut rng = Rng::with_seed(seed);
    let longest = millis(rng.u64(2000..12_000));
    let mut plan = plan(&mut rng, longest);
    if rng.u32(..4) == 0 {
        plan.grace = Duration::from_secs(8);
        plan.settings = plan.settings.outage(Outage::Keep(0.5)).grace(plan.grace);
    }
    let mut kinds = vec![Fault::Kill, Fault::Kill, Fault::Leave];
    kinds.extend(STORE);
    let end = faults(&mut rng, &mut plan, &kinds);
    (plan, end)
}

/// All that can happen, and slots that are others' only when the longest call is over.
pub fn strict(seed: u64) -> (Plan, At) {
    let mut rng = Rng::with_seed(seed);
    let longest = millis(rng.u64(2000..6000));
    let mut plan = plan(&mut rng, longest);
    plan.extra = longest;
    plan.settings = plan.settings.strict(longest);
    let mut kinds = vec![Fault::Kill, Fault::Leave];
    kinds.extend(STOPS);
    kinds.extend(STOPS);
    kinds.extend(STORE);
    let end = faults(&mut rng, &mut plan, &kinds);
    (plan, end)
}

/// Machines that sleep, and wake up.
pub fn sleeping(seed: u64) -> (Plan, At) {
    let mut rng = Rng::with_seed(seed);
    let longest = millis(rng.u64(1000..3000));
    let mut plan = plan(&mut rng, longest);
    plan.extra = longest;
    plan.settings = plan.settings.strict(longest);
    let end = faults(&mut rng, &mut plan, &[Fault::Stopped(Stop::Machine)]);
    (plan, end)
}

/// What the table calls exceeded: calls that run on after the ttl, of who cannot be heard.
pub fn not_strict(seed: u64) -> (Plan, At) {
    let mut rng = Rng::with_seed(seed);
    let mut plan = plan(&mut rng, millis(8000));
    let end = faults(&mut rng, &mut plan, &STOPS);
    (plan, end)
}

/// What is kept for the time without the store, also by who alone has lost it. Lost data are not among it: the store
/// forgets then what it promised to who is cut off.
pub fn keep(seed: u64) -> (Plan, At) {
    let mut rng = Rng::with_seed(seed);
    let longest = millis(rng.u64(2000..6000));
    let mut plan = plan(&mut rng, longest);
    let least = 2 * u32::try_from(plan.processes).unwrap_or(0);
    if plan.ceiling < least {
        plan.load.steady *= f64::from(least) / f64::from(plan.ceiling);
        plan.ceiling = least;
    }
    plan.extra = longest;
    plan.grace = millis(rng.u64(5000..15_000));
    let share = [0.3, 0.5, 1.0][rng.usize(..3)];
    plan.settings = plan.settings.strict(longest).outage(Outage::Keep(share)).grace(plan.grace);
    let mut kinds = vec![Fault::Kill, Fault::Outage, Fault::Step(1), Fault::Step(-1)];
    kinds.extend(STOPS);
    let end = faults(&mut rng, &mut plan, &kinds);
    (plan, end)
}

/// Nothing goes wrong, and there is always more to do than slots.
pub fn calm(seed: u64) -> (Plan, At) {
    let mut rng = Rng::with_seed(seed);
    let mut plan = plan(&mut rng, millis(2000));
    (plan.lost, plan.late, plan.twice, plan.wakes_lost) = (0, 0, 0, 0);
    plan.load.rate = plan.load.steady;
    plan.load.given_up = 0;
    (plan, 0)
}

/// A network that repeats itself, and waits that end early.
pub fn pauses(seed: u64) -> (Plan, At) {
    let mut rng = Rng::with_seed(seed);
    let mut plan = plan(&mut rng, millis(2000));
    (plan.twice, plan.mixed_up) = (400, 0);
    let begin = At::try_from(plan.ttl.as_nanos()).unwrap_or(0) + 2 * SECOND;
    plan.faults = (0..4).map(|i| (begin + i * 7 * SECOND, Fault::Pause)).collect();
    (plan, begin + 28 * SECOND)
}

/// One that is as in the field, and in which nothing happens of itself.
pub fn case(seed: u64, processes: usize, ceiling: u32, longest: Duration) -> Plan {
    let mut plan = plan(&mut Rng::with_seed(seed), longest);
    let mean = 0.4 * plan.load.usual.as_secs_f64() + 0.1 * longest.as_secs_f64();
    plan.load.steady = 2.5 * f64::from(ceiling) / mean / processes as f64;
    plan.load.rate = plan.load.steady;
    (plan.processes, plan.ceiling) = (processes, ceiling);
    (plan.ttl, plan.gap) = (millis(4000), millis(1500));
    plan.settings = plan.settings.ttl(plan.ttl).gap(plan.gap).renew(millis(600));
    plan
}
