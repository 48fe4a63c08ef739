//! The oracle: the best that anybody could do who still has to be told of a change once.
//!
//! It is one scheduler over all processes. It knows every limit from the start, down to the level of
//! each bucket, and so is never refused by a limit it knows. What nobody announced (a cut, a return,
//! an outage) it learns from the first reply that shows it: a refusal shows a cut, a success shows a
//! return. The hint of that refusal it obeys like everyone. Tasks wait in one line, pass those who
//! cannot be served in time any more, and go to the cheapest rung with room. Its calls are real calls, so its figures are real too.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::StatusCode;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use tower::ServiceExt;

use super::{Client, Policy, SimRequest, SimResponse, TaskInfo, World, erase};
use crate::BoxError;
use crate::provider::{Meter, Quota, ScriptedProvider};

const DAY: Duration = Duration::from_secs(86_400);

/// The ideal scheduler: knows every limit, learns of a change from one reply, obeys its hint, and
/// sends each task to the cheapest rung with room.
#[derive(Clone, Copy, Debug)]
pub struct Oracle;

impl Policy for Oracle {
    fn name(&self) -> &'static str {
        "oracle"
    }

    fn clients(&self, world: &World) -> Result<Vec<Client>, BoxError> {
        let rung = |provider: &ScriptedProvider| Rung {
            mirror: provider.meter(),
            provider: provider.clone(),
            in_flight: 0,
            unsent: Vec::new(),
            paused: Duration::ZERO,
        };
        let rungs = world.providers.iter().map(rung).collect();
        let settings = &world.settings;
        let longest = crate::scale(settings.latency, 1.0 + settings.spread) + settings.body;
        let brain = Arc::new(Brain {
            state: Mutex::new(State { rungs, line: VecDeque::new(), longest }),
            event: Notify::new(),
        });
        tokio::spawn(schedule(Arc::downgrade(&brain)));
        let client = Client::new(move |request, task| serve(brain.clone(), request, task));
        Ok(world.processes().map(|_| client.clone()).collect())
    }
}

struct Brain {
    state: Mutex<State>,
    event: Notify,
}

struct State {
    rungs: Vec<Rung>,
    line: VecDeque<Waiter>,
    /// The longest that a call may last.
    longest: Duration,
}

struct Waiter {
    cost: f64,
    /// The latest start from which a call is sure to end in time.
    latest: Instant,
    go: oneshot::Sender<Seat>,
}

struct Rung {
    provider: ScriptedProvider,
    /// What the oracle believes the provider's meter to be.
    mirror: Meter,
    in_flight: usize,
    /// Costs of calls that were let go but are not on the wire yet.
    unsent: Vec<f64>,
    /// Nobody calls before this instant of the provider's time.
    paused: Duration,
}

/// The right to one call; gives its place back when dropped.
struct Seat {
    brain: Arc<Brain>,
    rung: usize,
    cost: f64,
    sent: bool,
}

impl Brain {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    fn on_wire(&mut self, rung: &mut Rung) {
        if !self.sent {
            self.sent = true;
            if let Some(i) = rung.unsent.iter().position(|c| *c == self.cost) {
                rung.unsent.swap_remove(i);
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let brain = self.brain.clone();
        let mut state = brain.lock();
        let rung = &mut state.rungs[self.rung];
        self.on_wire(rung);
        rung.in_flight -= 1;
        drop(state);
        brain.event.notify_one();
    }
}

impl Rung {
    /// Takes over the truth, less what is about to arrive there.
    fn learn(&mut self) {
        let now = self.provider.elapsed();
        self.mirror = self.provider.meter();
        for cost in &self.unsent {
            self.mirror.charge(now, *cost);
        }
    }

    fn roomier(&self) -> bool {
        fn more(a: Option<f64>, b: Option<f64>) -> bool {
            match (a, b) {
                (Some(a), Some(b)) => a > b,
                (None, Some(_)) => true,
                _ => false,
            }
        }
        let (truth, known): (Quota, Quota) = (self.provider.quota(), self.mirror.quota());
        more(truth.concurrency.map(f64::from), known.concurrency.map(f64::from))
            || more(truth.requests.map(|r| r.per_second), known.requests.map(|r| r.per_second))
            || more(truth.tokens.map(|r| r.per_second), known.tokens.map(|r| r.per_second))
    }
}

impl State {
    /// Lets everybody go who has room. Returns when to look again without an event.
    fn pump(&mut self, brain: &Arc<Brain>) -> (Vec<(oneshot::Sender<Seat>, Seat)>, Option<Instant>) {
        let mut gone = Vec::new();
        let mut next: Option<Instant> = None;
        self.line.retain(|w| !w.go.is_closed());
        let now = Instant::now();
        while !self.line.is_empty() {
            // The first who can still be served in time; if nobody can, the first.
            let who = self.line.iter().position(|w| now <= w.latest).unwrap_or(0);
            let cost = self.line[who].cost;
            next = None;
            let mut found = None;
            for (i, rung) in self.rungs.iter_mut().enumerate() {
                let now = rung.provider.elapsed();
                let wait = if now < rung.paused {
                    // What is down for ever is looked at once a day.
                    rung.paused.saturating_sub(now).min(DAY)
                } else if rung.mirror.fits(now, rung.in_flight, cost) {
                    found = Some(i);
                    break;
                } else {
                    rung.mirror.wait(now, cost)
                };
                if !wait.is_zero() {
                    let at = rung.provider.started() + now + wait;
                    next = Some(next.map_or(at, |n| n.min(at)));
                }
            }
            let Some(i) = found else { break };
            let rung = &mut self.rungs[i];
            rung.in_flight += 1;
            rung.unsent.push(cost);
            rung.mirror.charge(rung.provider.elapsed(), cost);
            if let Some(waiter) = self.line.remove(who) {
                gone.push((waiter.go, Seat { brain: brain.clone(), rung: i, cost, sent: false }));
            }
        }
        (gone, next)
    }
}

async fn schedule(brain: std::sync::Weak<Brain>) {
    loop {
        let Some(brain) = brain.upgrade() else { return };
        let (gone, next) = brain.lock().pump(&brain);
        for (go, seat) in gone {
            // A seat that nobody takes returns its place when it is dropped here.
            drop(go.send(seat));
        }
        let until = next.unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
        tokio::select! {
            biased;
            () = brain.event.notified() => {}
            () = tokio::time::sleep_until(until) => {}
        }
    }
}

async fn serve(brain: Arc<Brain>, request: SimRequest, task: TaskInfo) -> Result<SimResponse, BoxError> {
    let mut again = false;
    loop {
        let (go, seat) = oneshot::channel();
        {
            let mut state = brain.lock();
            let latest = task.deadline.checked_sub(state.longest).unwrap_or(task.deadline);
            let waiter = Waiter { cost: task.cost, latest, go };
            if again { state.line.push_front(waiter) } else { state.line.push_back(waiter) }
        }
        brain.event.notify_one();
        let mut seat = seat.await.map_err(|_| "the oracle is gone")?;
        let service = {
            let mut state = brain.lock();
            let rung = &mut state.rungs[seat.rung];
            seat.on_wire(rung);
            rung.provider.service_for(task.process)
        };
        let reply = service.oneshot(request.clone()).await;
        let served = matches!(&reply, Ok(r) if r.status().is_success());
        {
            let mut state = brain.lock();
            let rung = &mut state.rungs[seat.rung];
            if served {
                if rung.roomier() {
                    rung.learn();
                }
            } else {
                if matches!(&reply, Ok(r) if r.status() == StatusCode::TOO_MANY_REQUESTS) {
                    rung.learn();
                    rung.paused = rung.paused.max(rung.provider.announced_until().unwrap_or_default());
                }
                rung.paused = rung.paused.max(rung.provider.fault_until().unwrap_or_default());
            }
        }
        if served {
            return finish(reply?, seat).await;
        }
        drop(seat);
        again = true;
    }
}

/// The place is held until the body has ended, as it is at the provider.
async fn finish(
    reply: http::Response<crate::provider::ScriptedBody>,
    seat: Seat,
) -> Result<SimResponse, BoxError> {
    use http_body_util::{BodyExt, Full};
    let (parts, body) = reply.into_parts();
    let bytes = body.collect().await?.to_bytes();
    drop(seat);
    Ok(erase(http::Response::from_parts(parts, Full::new(bytes))))
}
