-- One step of the fleet's book for one provider: takes a report in, answers with a grant.
--
-- The rules, and the reasons for them, are those of `Ledger` in the crate tower-herd (src/store/ledger): that
-- file by file, and function by function, is what this is. A test drives both with the same reports and compares
-- every grant; what is changed there is changed here.
--
--   KEYS[1]  the provider's hash: field `s` is the state, every other field the record of a holder
--   ARGV[1]  the report, as JSON
--   ARGV[2]  the channel on which holders are woken
--   ARGV[3]  which life of the server this is, as the client knows it; empty: asked here
--   ARGV[4]  `publish`, or `spublish` in a cluster
--
-- Returns the grant, as JSON. Wakes by a message on the channel: ids of holders with commas between, or `*`.
--
-- One key, so that lost data is always seen to be lost (a part of it would not be), and without an expiry, so
-- that no policy for volatile keys evicts it. Numbers are doubles, exact up to 2^53; everything but service
-- (`pass`) is whole. Times are milliseconds, by TIME only.

local min, max, floor = math.min, math.max, math.floor

local key, channel, run, publish = KEYS[1], ARGV[2], ARGV[3], ARGV[4]
local report = cjson.decode(ARGV[1])
local holder = report.holder
local news, asked_rates = report.news or {}, report.rates or {}

-- ---------------------------------------------------------------- constants

local MANY = 100            -- above so many records, shares are worked out for all only now and then:
local EVERY = 250           -- so often,
local LACKING = 64          -- and so many of those who lack slots are remembered
local STEP = 1000           -- a smaller step of the clock is no sign of another machine
local AGAIN_MIN, AGAIN_MAX = 20, 250
local DAY = 24 * 3600 * 1000
local MOST = 2 ^ 20 - 1     -- slots
local HEAVIEST = 1000       -- weight
local TENURE = 250          -- slot-milliseconds
local DEBT = 1000           -- the same: who had more service than others waits for no more than so much of theirs

-- A record is an array, since a thousand of them are read at once.
local SEQ, VERSION, CHARGE, NEED, HEADROOM, BUSY, WEIGHT = 1, 2, 3, 4, 5, 6, 7
local SAFE, TOLD_SAFE, TARGET, PASS, HEARD, UNTIL, GRACE = 8, 9, 10, 11, 12, 13, 14
local PENDING, LAPSED, LEFT, LIMITS, REQUESTS, TOKENS, LABEL = 15, 16, 17, 18, 19, 20, 21

local function clamp(x, low, high)
  return max(low, min(x, high))
end

-- ---------------------------------------------------------------- shares.rs

-- Weighted max-min fairness: sets `given` of each ask {id, want, weight, has, pass, last}.
local function shares(there, asks)
  local order, weights, wanted = {}, 0, 0
  for _, a in ipairs(asks) do
    a.given = 0
    if a.want > 0 then
      order[#order + 1] = a
      weights = weights + a.weight
      wanted = wanted + a.want
    end
  end
  if wanted <= there then
    for _, a in ipairs(order) do a.given = a.want end
    return wanted
  end
  if there == 0 then return 0 end
  table.sort(order, function(a, b)
    local x, y = a.want * b.weight, b.want * a.weight
    if x ~= y then return x < y end
    return a.id < b.id
  end)
  local left, short = there, {}
  for _, a in ipairs(order) do
    if #short == 0 and a.want * weights <= left * a.weight then
      a.given = a.want
      left = left - a.want
      weights = weights - a.weight
    else
      short[#short + 1] = a
    end
  end
  local part = left
  for _, a in ipairs(short) do
    a.given = floor(part * a.weight / weights)
    left = left - a.given
    a.turn = a.has > a.given and a.pass - TENURE / a.weight or a.pass
  end
  if left > 0 then
    table.sort(short, function(a, b)
      if a.turn ~= b.turn then return a.turn < b.turn end
      if a.last ~= b.last then return a.last < b.last end
      return a.id < b.id
    end)
    for i = 1, min(left, #short) do short[i].given = short[i].given + 1 end
  end
  return there
end

-- ---------------------------------------------------------------- limits.rs

-- The limits of a member as one text, since most say the same: generation, floor, start, ceiling, requests
-- (a minute, burst), tokens (a minute, burst); `-` for none.
local function limits_text(l)
  local r, t = l.requests or {}, l.tokens or {}
  return table.concat({ l.generation, l.floor, l.start, l.ceiling or '-', r.per_minute or '-', r.burst or '-',
    t.per_minute or '-', t.burst or '-' }, ' ')
end

local function limits_of(text)
  local l = {}
  for word in string.gmatch(text, '%S+') do l[#l + 1] = tonumber(word) or false end
  return l
end

-- The highest generation counts; of one, the lowest of each limit, where known beats unknown.
local function merge(a, b)
  if not a or b[1] > a[1] then return b end
  if b[1] < a[1] then return a end
  local merged, differs = {}, false
  for i = 1, 8 do
    differs = differs or a[i] ~= b[i]
    merged[i] = a[i] and b[i] and min(a[i], b[i]) or a[i] or b[i]
  end
  merged[9] = differs or a[9]
  return merged
end

-- ---------------------------------------------------------------- the clock, and lives of the book

local time = redis.call('TIME')
local clock = time[1] * 1000 + floor(time[2] / 1000)

if run == '' then
  -- INFO may be forbidden to us. Then a promoted replica is seen only by a version that it does not know.
  local info = redis.pcall('INFO', 'server')
  run = type(info) == 'string' and string.match(info, 'run_id:(%x+)') or 'none'
end

local gap_most = clamp(report.terms.gap, 100, DAY)
local learning_time = min(report.terms.ttl, DAY) + min(report.terms.extra, DAY)
local weight = clamp(report.weight, 1, HEAVIEST)

-- All records, or where there are many, first only what is needed without a look at all.
local s, records, dirty, gone = nil, {}, {}, {}
local read, own_text = false, nil

local function read_all()
  if read then return end
  read = true
  local raw = redis.call('HGETALL', key)
  for i = 1, #raw, 2 do
    local value = cmsgpack.unpack(raw[i + 1])
    if raw[i] == 's' then s = s or value else records[raw[i]] = value end
  end
end

if redis.call('HLEN', key) > MANY + 1 then
  local found = redis.call('HMGET', key, 's', holder)
  s, own_text = found[1] and cmsgpack.unpack(found[1]), found[2]
else
  read_all()
end
local lost = not s or s.run ~= run or (report.epoch == s.epoch and report.version > s.counter)

-- A lease has run out: what is left is what is safe.
local function lapse(r)
  r[HEARD] = r[UNTIL]
  r[CHARGE] = min(r[CHARGE], r[SAFE])
  r[BUSY] = min(r[BUSY], r[CHARGE])
  r[UNTIL] = r[UNTIL] + r[GRACE]
  r[LAPSED], r[PENDING] = true, false
  r[NEED], r[HEADROOM], r[TARGET] = 0, 0, 0
end

if lost then
  -- Nobody believes who holds what. The rest is kept, if there is something to keep: a pause of hours does not end
  -- because a replica was promoted.
  local now = s and s.now + max(0, clock - s.clock) or clock
  if s then
    read_all()
    for id, r in pairs(records) do
      if min(r[SAFE], r[CHARGE]) > 0 then
        -- Its holder may be cut off, and use it still. There was no service in this life yet.
        r[UNTIL], r[PASS] = now + learning_time, 0
        lapse(r)
        dirty[id] = true
      else
        records[id] = nil
      end
    end
    for _, scope in ipairs(s.scopes) do
      if scope.open then scope.open.version = 0 end
    end
  else
    records = {}
  end
  redis.call('DEL', key)
  s = {
    epoch = report.offer, run = run, clock = clock, now = now,
    began = now, learn_until = now + learning_time, hard = true,
    counter = s and s.counter or 0, low = 0, n = 0,
    scopes = s and s.scopes or {}, scope_generation = s and s.scope_generation or 0,
    rates = { false, false }, merged = limits_of(limits_text(report.limits)), text = false,
    plan = { at = 0, stored = false, lack = {}, needy = 0, wanting = { 0, 0 } },
    control = s and s.control or {
      floor = 1, configured = false, limit = false, cap = clamp(report.limits.start, 1, MOST), generation = 1,
      release = false, event = { base = 0, before = 0, calls = 0, spare = 0, proven = 0, cost = 0 }, probe = false,
      high = { proven = 0, now = 0, since = 0 },
      last = clamp(report.limits.start, 1, MOST),
    },
  }
end

local plan, control, scopes = s.plan, s.control, s.scopes

-- The book's own clock never goes back: all that is kept here can only get longer by a step.
local passed, back = max(0, clock - s.clock), max(0, s.clock - clock)
local was_hard = s.hard and s.now < s.learn_until
s.clock, s.now = clock, s.now + passed
local now = s.now

local jumped = passed > gap_most or back > STEP
local full = lost or jumped or not plan.stored or now >= plan.at + EVERY
if full and not lost then
  read_all()
elseif own_text and not lost then
  records[holder] = cmsgpack.unpack(own_text)
end

if jumped then
  local any = false
  for id, r in pairs(records) do
    if not r[LEFT] or r[CHARGE] > 0 then
      any = true
      r[PENDING] = true
      r[UNTIL] = max(r[UNTIL], now + (r[LAPSED] and r[GRACE] or learning_time))
      dirty[id] = true
    end
  end
  -- An empty fleet is silent, and nobody holds anything. But who held something by a lost book may do so still.
  if any or was_hard then
    s.hard, s.began, s.learn_until = was_hard, now, now + learning_time
  end
end

-- ---------------------------------------------------------------- record.rs

local function member(r) return not (r[LAPSED] or r[LEFT]) end

local function pass_at(r, at)
  return r[PASS] + r[CHARGE] * max(0, at - r[HEARD]) / r[WEIGHT]
end

-- Its time is over: first to what is safe, then altogether.
local function expire(id, r)
  if now >= r[UNTIL] and not r[LAPSED] and min(r[SAFE], r[CHARGE]) > 0 then
    r[PASS] = pass_at(r, r[UNTIL])
    lapse(r)
    dirty[id] = true
  end
  if now >= r[UNTIL] then
    records[id] = nil
    gone[#gone + 1] = id
  end
end

-- ---------------------------------------------------------------- scopes.rs

local NAMED, TOLD, LONG, SOON = 64, 60000, 5 * 60000, 50

local function paused(scope)
  return scope.pause and now < scope.pause['until'] and scope.pause
end

local function probing(scope)
  return scope.probe and now < scope.probe['until'] and scope.probe
end

local function in_force(scope)
  return scope.open or paused(scope)
end

local function find(name)
  name = name or ''
  for _, scope in ipairs(scopes) do
    if scope.name == name then return scope end
  end
end

local function forget()
  if #scopes == 0 then return end
  local kept = {}
  for _, scope in ipairs(scopes) do
    if scope.open and now >= scope.open['until'] + DAY then scope.open = false end
    if in_force(scope) then
      scope.keep = max(scope.keep, now + TOLD)
    elseif scope.pause then
      local pause = scope.pause
      scope.pause = false
      scope.over = max(scope.over, pause['until'])
      scope.keep = max(scope.keep, pause['until'] + max(TOLD, pause['until'] - pause.began))
    end
    if now < scope.keep then kept[#kept + 1] = scope end
  end
  scopes = kept
  s.scopes = kept
end

local function entry(name)
  name = name or ''
  local named = 0
  for _, scope in ipairs(scopes) do
    if scope.name == name then return scope end
    if scope.name ~= '' then named = named + 1 end
  end
  if name ~= '' and named >= NAMED then return nil end
  local scope = { name = name, generation = 0, pause = false, open = false, probe = false, calls = 0,
    throttled = 0, over = 0, incident = 0, keep = now + TOLD }
  scopes[#scopes + 1] = scope
  return scope
end

local function stamp(scope)
  s.scope_generation = s.scope_generation + 1
  scope.generation = s.scope_generation
end

local function reset_tally(scope)
  scope.calls, scope.throttled = 0, 0
end

local function pause(name, wait, reason)
  wait = min(wait, DAY)
  local till = now + wait
  local scope = entry(name)
  if not scope then return false end
  local before = paused(scope)
  local ends = before and before['until'] or now
  if till <= ends then return false end
  local p = { ['until'] = till, reason = reason, probe_at = false, gap = 0, began = now }
  if before then p.probe_at, p.gap, p.began = before.probe_at, before.gap, before.began end
  if wait > LONG then
    local gap = max(LONG, floor(wait / 20))
    local due = now + gap
    if not p.probe_at then reset_tally(scope) end
    p.probe_at = p.probe_at and p.probe_at > now and min(p.probe_at, due) or due
    p.gap = gap
  end
  scope.pause = p
  stamp(scope)
  scope.keep = max(scope.keep, till + TOLD)
  return till > ends + SOON
end

local function clear(name, generation)
  local scope = find(name)
  if not scope or scope.generation ~= generation or not paused(scope) then return false end
  scope.keep = now + max(TOLD, now - scope.pause.began)
  scope.pause, scope.probe, scope.over = false, false, now
  stamp(scope)
  return true
end

-- Half of the longest time between two probes is the most here: the members add as much again at most.
local function later(open)
  open.gap = min(open.gap * 2, max(floor(open.last / 2), open.gap))
end

local function opened(name, wait, first, last, version)
  local scope = entry(name)
  if not scope or scope.open then return false end
  first = min(first, DAY)
  -- One that opens again before its ramp is over is the same trouble: no second alert.
  if now < scope.incident then version = 0 end
  scope.open = { since = now, ['until'] = now + min(wait, DAY), first = first, last = min(last, DAY), gap = first,
    probe_at = now + first, by = holder, version = version }
  scope.probe = false
  reset_tally(scope)
  stamp(scope)
  scope.keep = max(scope.keep, now + TOLD)
  return true
end

local function closed(name, generation)
  local scope = find(name)
  if not scope or not scope.open then return false end
  if generation ~= 0 and scope.generation ~= generation then return false end
  local length = max(0, now - scope.open.since)
  scope.open, scope.probe, scope.over = false, false, now
  stamp(scope)
  scope.incident = now + length
  scope.keep = now + max(TOLD, length)
  reset_tally(scope)
  return true
end

local function tally(name, calls, throttled)
  local scope = find(name)
  if scope then
    scope.calls = min(scope.calls + calls, 2 ^ 40)
    scope.throttled = min(scope.throttled + throttled, 2 ^ 40)
  end
end

local function may_probe(name)
  local scope = find(name)
  if not scope then return false end
  if scope.name ~= '' then
    local root = find()
    local probe = root and in_force(root) and (probing(root) or {})
    if probe and probe.holder ~= holder then return false end
  end
  local probe = probing(scope)
  -- Its own, and it asks again: it was not told.
  if probe then return probe.holder == holder end
  local own = paused(scope)
  if not own and not scope.open then return false end
  if own and not (own.probe_at and own.probe_at <= now) then return false end
  return not scope.open or scope.open.probe_at <= now
end

local function send_probe(name, timeout)
  local scope = find(name)
  if not scope or probing(scope) then return end
  local given_up = scope.probe
  scope.probe = { holder = holder, sent = now, ['until'] = now + clamp(timeout, 1, DAY) }
  local own = paused(scope)
  if own then own.probe_at = now + own.gap end
  if scope.open then
    if given_up then later(scope.open) end
    scope.open.probe_at = now + scope.open.gap
  end
end

local function probed(name, failed)
  local scope = find(name)
  if not scope or not scope.probe or scope.probe.holder ~= holder then return end
  local probe, open = scope.probe, scope.open
  scope.probe = false
  if not open then return end
  if failed then
    later(open)
    open.probe_at = now + open.gap
  else
    open.probe_at = min(open.probe_at, probe.sent + open.first)
  end
end

local function told_scopes(known, asked)
  local told = {}
  for _, scope in ipairs(scopes) do
    local t = { generation = scope.generation, calls = scope.calls, throttled = scope.throttled }
    if scope.name ~= '' then t.scope = scope.name end
    local p, open, probe = paused(scope), scope.open, probing(scope)
    if p then t.pause = { wait = p['until'] - now, reason = p.reason } end
    if open then
      t.open = { wait = max(0, open['until'] - now), since = now - open.since, first = open.first,
        last = open.last, yours = open.by == holder and known < open.version }
    end
    if probe and probe.holder == holder and asked[scope.name] then t.leave = { within = probe['until'] - now } end
    told[#told + 1] = t
  end
  return told
end

-- ---------------------------------------------------------------- control.rs

local APART, APART_MOST, COST, SETTLE, DOUBLE, GOOD, GROW = 20, 600000, 1000, 600, 1000, 1000, 3

local function no_probe(fields)
  local p = { step = 1, at = 0, gap = 0, misses = 0, out = false, since = false, peak = 0, good = 0 }
  for name, value in pairs(fields or {}) do p[name] = value end
  control.probe = p
end

if not control.probe then no_probe() end

local function full_ceiling() return control.limit or control.cap end
local function most() return control.configured or MOST end

local function configure(least, ceiling)
  ceiling = ceiling and min(ceiling, MOST)
  control.floor = clamp(least, 1, MOST)
  control.cap = max(control.cap, control.floor)
  if ceiling ~= control.configured then
    control.configured = ceiling
    control.generation = control.generation + 1
    if ceiling then
      control.limit = ceiling
      no_probe()
      if control.release then control.release.doubt = false end
    end
  end
  if control.limit then control.limit = min(max(control.limit, control.floor), most()) end
end

local function restart(doubt)
  control.release = { since = now, from = false, base = false,
    doubt = doubt or control.release and control.release.doubt or false }
end

local function throttled(generation, calls, wait, busy)
  local cost = clamp(wait, COST, DAY)
  calls = max(calls, 1)
  if generation >= control.generation then
    local probe = control.probe
    local out = probe.out or probe.since
    local spare = out and probe.step or 0
    control.event = { base = busy + calls, before = min(full_ceiling(), control.last), calls = 0, spare = spare,
      proven = control.high.proven, cost = cost }
    control.high = { proven = 0, now = 0, since = now }
    control.generation = control.generation + 1
    no_probe({ at = now, misses = out and min(probe.misses + 1, 10) or 0 })
    restart(false)
  end
  local event = control.event
  event.calls = event.calls + calls
  event.cost = max(event.cost, cost)
  if event.calls > event.spare then
    local served = min(max(0, event.base - event.calls), event.before, full_ceiling())
    control.limit = min(max(served, control.floor), most())
    control.probe.misses = 0
    -- On the way up, where it had not been for long: that is the limit. Where so many were served before, it has
    -- fallen, and nobody knows how far.
    if control.release then control.release.doubt = served <= event.proven + floor(event.proven / 4) end
  end
  local plain = APART * event.cost
  control.probe.gap = min(plain * 2 ^ control.probe.misses, max(APART_MOST, plain))
end

local function overloaded(generation, wait)
  if generation < control.generation then return end
  control.generation = control.generation + 1
  no_probe({ at = now, gap = APART * clamp(wait, COST, DAY) })
  restart(true)
  control.release.base = max(control.last - floor(control.last / 4), control.floor)
end

local function ramp()
  local all, release = full_ceiling(), control.release
  if not release or not release.from or not release.base then return all end
  local gone_by, base = max(0, now - release.from), min(release.base, all)
  if not release.doubt then
    return min(base + floor((all - base) * min(gone_by, SETTLE) / SETTLE), all)
  end
  local doublings = floor(gone_by / DOUBLE)
  if doublings >= 20 then return all end
  return min(floor(max(base, 1) * 2 ^ doublings * (DOUBLE + gone_by % DOUBLE) / DOUBLE), all)
end

local function settle_probe(sums, served)
  local limit, probe, high = control.limit, control.probe, control.high
  if now >= high.since + GOOD then high.proven, high.since = high.now, now end
  high.now = max(high.now, sums.busy)
  if not limit then return end
  if sums.busy > limit and probe.out and not probe.since then
    probe.since, probe.peak, probe.good = now, 0, 0
  elseif probe.since then
    probe.good = probe.good + served
  end
  if not probe.since then
    probe.out = probe.out and sums.charge > limit
    return
  end
  probe.peak = max(probe.peak, sums.busy)
  if now >= probe.since + GOOD and probe.good >= 2 then
    local above = limit + probe.step
    local proven = min(probe.peak, above)
    no_probe({ at = now, step = proven == above and min(probe.step * 2, floor(limit / 2) + 1) or probe.step })
    control.limit = min(max(proven, limit), most())
  end
end

local function settle(is_closed, ended, sums, served)
  local busy, release = min(sums.busy, MOST), control.release
  if is_closed then
    if not release then
      restart(not control.limit)
    elseif release.from then
      control.release = { since = now, from = false, base = false, doubt = release.doubt }
    end
    control.probe.out, control.probe.since = false, false
    return
  end
  if release then
    if not release.from then
      release.from = min(max(release.since, ended), now)
      if not release.base then
        release.base = max(busy, release.doubt and 1 or floor(full_ceiling() / 6), 1)
      end
    end
    if ramp() >= full_ceiling() then control.release = false end
  end
  if not control.limit and not control.release and served > 0 and sums.need >= control.cap then
    control.cap = min(control.cap + GROW * served, MOST)
  end
  settle_probe(sums, served)
end

local function looks_above(ended, sums)
  local limit, probe = control.limit, control.probe
  if not limit or limit >= most() then return false end
  return probe.since or now >= max(probe.at, ended) + probe.gap and sums.need > limit
end

local function ceiling_in_force(is_closed, ended, sums)
  local all, release = full_ceiling(), control.release
  if release and not release.from and is_closed then
    local least = release.doubt and 1 or floor(all / 6)
    control.last = min(release.base or max(min(sums.busy, MOST), least, 1), all)
  elseif release then
    control.last = ramp()
  elseif looks_above(ended, sums) then
    control.last = min(all + control.probe.step, most())
  else
    control.last = all
  end
  return control.last
end

-- When the ceiling in force will be so many more.
local function again(more)
  local release, all = control.release, full_ceiling()
  if not release or not release.from or not release.base then return nil end
  local base = min(release.base, all)
  local wanted = ramp() + more
  if wanted > all then return nil end
  local at
  if release.doubt then
    base = max(base, 1)
    local n = 0
    while n < 20 and base * 2 ^ (n + 1) <= wanted do n = n + 1 end
    at = n * DOUBLE + math.ceil(wanted * DOUBLE / (base * 2 ^ n)) - DOUBLE
  else
    at = math.ceil((wanted - base) * SETTLE / max(all - base, 1))
  end
  return max(0, release.from + at - now)
end

-- ---------------------------------------------------------------- rates.rs

-- A level counts in units of 1/60000, so that a rate a minute is so many a millisecond, without remainder.
local VALID, UNIT, FASTEST, SILENCE = 2000, 60000, 2000000000, 3600000

local function rate_configure(b, per_minute, burst)
  b.per_minute, b.burst = min(per_minute, FASTEST), min(burst, FASTEST)
  b.level = min(b.level, b.burst * UNIT)
end

local function rate_fill(b)
  local elapsed = clamp(now - b.at, 0, SILENCE)
  b.level = min(b.level + b.per_minute * elapsed, b.burst * UNIT)
  b.at = now
  if now >= b.since + VALID then
    b.before = now >= b.since + 2 * VALID and 0 or b.handed
    b.since, b.handed = now, 0
  end
end

local function rate_give_back(b, held, r)
  if r.chunk == 0 or r.chunk ~= held.chunk or now >= held['until'] then return end
  local rest = min(r.rest, held.amount)
  b.level = min(b.level + rest * UNIT, b.burst * UNIT)
  b.handed = max(0, b.handed - rest)
  held.chunk, held.amount = 0, 0
end

local function rate_observe(b, held, left)
  local own = now < held['until'] and held.amount or 0
  local others = max(0, b.handed + b.before - own)
  b.level = min(b.level, max(0, min(left, FASTEST) - others) * UNIT)
end

-- The part of `own`, one of `asks`; and when there is more.
local function rate_part(b, least, asks, own)
  local there = floor(b.level / UNIT)
  least = min(least, own.want)
  shares(there, asks)
  if least <= there then return max(own.given, least) end
  if least > b.burst or b.per_minute == 0 then return 0 end
  return 0, clamp(math.ceil((least * UNIT - b.level) / b.per_minute), 20, 1000)
end

-- ---------------------------------------------------------------- mod.rs: the step

forget()
if full then
  for id, r in pairs(records) do expire(id, r) end
  local low
  for _, r in pairs(records) do
    if member(r) and r[NEED] > 0 then
      local pass = pass_at(r, now)
      if not low or pass < low then low = pass end
    end
  end
  if low then s.low = max(low, s.low) end
end
s.hard = s.hard and now < s.learn_until
if s.hard then s.learn_until = max(s.learn_until, s.began + learning_time) end

-- Sums over all records: of all of them where they are at hand, else kept up to date.
local sums = s.sums
local function count(sign, r)
  sums.charge = sums.charge + sign * r[CHARGE]
  sums.safe = sums.safe + sign * min(r[SAFE], r[CHARGE])
  sums.need = sums.need + sign * r[NEED]
  -- A slot that was given to one who waits for it is in use from then on, and that is reported only much later.
  sums.busy = sums.busy + sign * max(r[BUSY], min(r[NEED], r[CHARGE]))
  sums.lack = sums.lack + sign * max(0, r[NEED] - r[CHARGE])
  sums.pending = sums.pending + sign * (r[PENDING] and 1 or 0)
  if member(r) then
    sums.members = sums.members + sign
    sums.weights = sums.weights + sign * r[WEIGHT]
  end
end
if full then
  sums = { charge = 0, safe = 0, need = 0, busy = 0, lack = 0, pending = 0, members = 0, weights = 0 }
  s.sums = sums
  s.n = 0
  for _, r in pairs(records) do
    count(1, r)
    s.n = s.n + 1
  end
end

local own = records[holder]
local before = own and own[SEQ] or 0
local known = report.epoch == s.epoch and report.version or 0
local acked = own and known > 0 and known == own[VERSION] and not own[LAPSED]
local stale = own and report.seq <= before or false
local own_limits = limits_text(report.limits)

local function next_version()
  s.counter = s.counter + 1
  return s.counter
end

local function rate_of(r, i)
  if not r[REQUESTS + i - 1] then r[REQUESTS + i - 1] = { want = 0, chunk = 0, amount = 0, ['until'] = 0 } end
  return r[REQUESTS + i - 1]
end

local asked_rate = { false, false }
for _, r in ipairs(asked_rates) do
  local i = r.of == 'requests' and 1 or 2
  asked_rate[i] = asked_rate[i] or r
end

-- Writes down what the holder says it has and needs.
if not stale then
  if own then count(-1, own) else s.n = s.n + 1 end
  local charge = own and own[CHARGE] or 0
  if s.hard then charge = max(charge, report.held) end
  if acked then charge = min(report.held, charge) end
  charge = max(charge, report.busy)
  local enters = not own or not member(own) or own[NEED] == 0
  local pass = own and pass_at(own, now) or s.low
  if enters then pass = max(pass, s.low) end
  pass = min(pass, s.low + DEBT / weight)
  if not own then
    own = { 0, next_version(), 0, 0, 0, 0, 1, 0, 0, 0, 0, now, now, 0, false, false, false, '', false, false, '' }
    records[holder] = own
  elseif own[LAPSED] then
    own[VERSION] = next_version()
  end
  if acked then own[SAFE] = own[TOLD_SAFE] end
  own[SEQ], own[CHARGE], own[PASS], own[HEARD], own[BUSY] = report.seq, charge, pass, now, report.busy
  own[WEIGHT] = weight
  own[UNTIL], own[GRACE] = now + learning_time, min(report.terms.grace, DAY)
  own[LABEL], own[LIMITS] = report.label, own_limits
  own[PENDING], own[LAPSED], own[LEFT] = false, false, report.bye
  own[NEED], own[HEADROOM] = report.need, max(report.headroom, report.need)
  if report.bye then own[NEED], own[HEADROOM] = 0, 0 end
  for i = 1, 2 do
    local asked = not report.bye and asked_rate[i]
    if asked or own[REQUESTS + i - 1] then rate_of(own, i).want = asked and min(asked.want, FASTEST) or 0 end
  end
  if report.bye then
    own[SAFE], own[TOLD_SAFE], own[TARGET] = 0, 0, 0
    for _, scope in ipairs(scopes) do
      if scope.probe and scope.probe.holder == holder then scope.probe = false end
    end
  end
  count(1, own)
end

local learning = now < s.learn_until and (s.hard or sums.pending > 0)

-- The limits in force. `s.text` are those that all members agree on: mostly, that is what they did before.
if not full then
  if not report.bye and not stale and own_limits ~= s.text then
    s.merged, s.text = merge(s.merged, limits_of(own_limits)), false
  end
else
  local one, more
  for _, r in pairs(records) do
    if member(r) then
      one = one or r[LIMITS]
      more = more or r[LIMITS] ~= one
    end
  end
  if more then
    local merged, seen = nil, {}
    for _, r in pairs(records) do
      if member(r) and not seen[r[LIMITS]] then
        seen[r[LIMITS]] = true
        merged = merge(merged, limits_of(r[LIMITS]))
      end
    end
    s.merged, s.text = merged, false
  elseif one and one ~= s.text then
    s.merged, s.text = limits_of(one), one
  end
end
configure(s.merged[2], s.merged[4])
for i = 1, 2 do
  local b, per_minute, burst = s.rates[i], s.merged[3 + 2 * i], s.merged[4 + 2 * i]
  if not per_minute then
    s.rates[i] = false
  else
    if b then
      rate_fill(b)
    else
      -- It begins empty: nobody knows what was handed out before.
      b = { level = 0, at = now, since = now, handed = 0, before = 0 }
      s.rates[i] = b
    end
    rate_configure(b, per_minute, burst)
  end
end

-- What happened.
local wake_all = false
if not stale then
  for _, n in ipairs(news) do
    local what, wake = n.what, false
    if what == 'throttled' then
      -- What the reporter has in flight it says itself: who was refused is none of them.
      local unseen = own and max(0, min(own[NEED], own[CHARGE]) - own[BUSY]) or 0
      throttled(n.generation, n.calls, n.wait, sums.busy - unseen)
    elseif what == 'overloaded' then
      overloaded(n.generation, n.wait)
    elseif what == 'paused' then
      wake = pause(n.scope, n.wait, n.reason)
    elseif what == 'cleared' then
      wake = clear(n.scope, n.generation)
    elseif what == 'opened' then
      wake = opened(n.scope, n.wait, n.first, n.last, s.counter + 1)
      if wake then own[VERSION] = next_version() end
    elseif what == 'closed' then
      wake = closed(n.scope, n.generation)
    elseif what == 'probed' then
      probed(n.scope, n.failed)
    elseif what == 'ramped' then
      tally(n.scope, n.calls, n.throttled)
    elseif what == 'quota' then
      local i = n.of == 'requests' and 1 or 2
      if s.rates[i] then rate_observe(s.rates[i], own[REQUESTS + i - 1] or { amount = 0, ['until'] = 0 }, n.left) end
    end
    wake_all = wake_all or wake
  end
end

local root = find()
local is_closed = root and in_force(root) and true or false
local ended = root and max(root.pause and root.pause['until'] or 0, root.over) or 0
settle(is_closed, ended, sums, stale and 0 or report.served)
local ceiling = ceiling_in_force(is_closed, ended, sums)

-- What each should have.
local place = LACKING
if full then
  local patience = floor(gap_most / 2)
  local asks, needy = {}, 0
  for id, r in pairs(records) do
    if member(r) then
      local need, headroom = r[NEED], r[HEADROOM]
      if need > 0 then needy = needy + 1 end
      if now - r[HEARD] > patience then need, headroom = min(need, r[CHARGE]), 0 end
      need, headroom = min(need, ceiling), min(headroom, ceiling)
      asks[#asks + 1] = { id = id, want = need, weight = r[WEIGHT], has = r[CHARGE], pass = pass_at(r, now), last = r[VERSION],
        need = need, headroom = headroom, target = 0, record = r }
    elseif s.n > MANY and r[TARGET] ~= 0 then
      r[TARGET] = 0
      dirty[id] = true
    end
  end
  local left = ceiling - shares(ceiling, asks)
  for _, a in ipairs(asks) do a.target = a.given end
  if left > 0 then
    for _, a in ipairs(asks) do
      a.want, a.has = max(0, a.headroom - a.target), max(0, a.has - a.target)
    end
    shares(left, asks)
    for _, a in ipairs(asks) do a.target = a.target + a.given end
  end
  local stored, lack = s.n > MANY, {}
  for _, a in ipairs(asks) do
    local r = a.record
    if min(a.target, a.need) > r[CHARGE] then lack[#lack + 1] = a end
    if (stored and r[TARGET] ~= a.target) or a.id == holder then
      r[TARGET] = a.target
      dirty[a.id] = true
    end
  end
  table.sort(lack, function(a, b)
    if a.pass ~= b.pass then return a.pass < b.pass end
    if a.last ~= b.last then return a.last < b.last end
    return a.id < b.id
  end)
  local ids = {}
  for i = 1, stored and min(#lack, LACKING) or #lack do ids[i] = lack[i].id end
  plan = { at = now, stored = stored, lack = ids, needy = needy, wanting = plan.wanting }
  s.plan = plan
elseif own then
  -- Between two plans: where nobody lacks any, who needs more takes what is free.
  own[TARGET] = min(own[TARGET], ceiling)
  if #plan.lack == 0 then own[TARGET] = max(own[TARGET], min(own[NEED], ceiling)) end
end

if not stale and not report.bye then
  local bound = learning and min(ceiling, report.terms.trickle) or ceiling
  local free = is_closed and 0 or max(0, bound - sums.charge)
  local more = min(max(0, own[TARGET] - own[CHARGE]), free)
  if more > 0 then
    count(-1, own)
    own[CHARGE] = own[CHARGE] + more
    own[VERSION] = next_version()
    count(1, own)
  end
end
if report.bye or own and min(own[TARGET], own[NEED]) <= own[CHARGE] then
  local kept = {}
  for _, id in ipairs(plan.lack) do
    if id ~= holder then kept[#kept + 1] = id end
  end
  plan.lack = kept
end
if control.limit and sums.charge > control.limit and control.last > control.limit then control.probe.out = true end

-- Probes that may go. Each needs a slot, as every call does.
local asked = {}
if not stale and not own[LEFT] then
  for _, n in ipairs(news) do
    if n.what == 'probe' and may_probe(n.scope) then
      local has = own[CHARGE] > own[BUSY]
      if not has and not learning and sums.charge < full_ceiling() then
        count(-1, own)
        own[CHARGE] = own[CHARGE] + 1
        own[VERSION] = next_version()
        count(1, own)
        has = true
      end
      if has then
        send_probe(n.scope, n.timeout)
        asked[n.scope or ''] = true
      end
    end
  end
end

-- What the holder gets of each rate.
local chunks, rate_again = {}, nil
for i = 1, 2 do
  local b, r = s.rates[i], not stale and asked_rate[i]
  if b then
    if r and own[REQUESTS + i - 1] then rate_give_back(b, rate_of(own, i), r) end
    local chunk = { of = i == 1 and 'requests' or 'tokens', chunk = 0, amount = 0, valid = 0,
      per_minute = b.per_minute, burst = b.burst }
    if r and not report.bye then
      local asks, mine = {}, nil
      if full then
        local wanting = 0
        for id, other in pairs(records) do
          local held = other[REQUESTS + i - 1]
          if member(other) and held then
            if held.want > 0 then wanting = wanting + other[WEIGHT] end
            local ask = { id = id, want = held.want, weight = other[WEIGHT], has = 0, pass = pass_at(other, now),
              last = other[VERSION] }
            asks[#asks + 1] = ask
            if id == holder then mine = ask end
          end
        end
        plan.wanting[i] = wanting
      else
        -- The others as they were when all were looked at last: as one who wants everything.
        mine = { id = '0', want = rate_of(own, i).want, weight = own[WEIGHT], has = 0, pass = pass_at(own, now),
          last = own[VERSION] }
        asks[1] = mine
        local others = max(0, plan.wanting[i] - own[WEIGHT])
        if others > 0 then asks[2] = { id = '1', want = FASTEST, weight = others, has = 0, pass = 0, last = 0 } end
      end
      local amount, at = rate_part(b, r.least, asks, mine)
      if at then rate_again = rate_again and min(rate_again, at) or at end
      if amount > 0 then
        local held = rate_of(own, i)
        local number = next_version()
        b.level = b.level - amount * UNIT
        b.handed = b.handed + amount
        held.chunk, held.amount, held['until'] = number, amount, now + VALID
        held.want = max(0, held.want - amount)
        chunk.chunk, chunk.amount, chunk.valid = number, amount, VALID
      end
    end
    chunks[#chunks + 1] = chunk
  end
end

local charge, target = own and own[CHARGE] or 0, own and own[TARGET] or 0
-- What is charged beyond the ceiling is in flight, or was: it is not there to be used again.
local slots = min(charge, max(0, max(ceiling, full_ceiling()) - (sums.charge - charge)))

-- What the holder may use after its lease has run out. A lower promise counts when it is known to have heard it.
if not stale and not own[LEFT] then
  local all = full_ceiling()
  local keep = type(report.terms.keep) == 'number' and clamp(report.terms.keep, 0, 1) or 0
  local safe = 0
  if all >= 2 * sums.members then
    -- What is kept for those who are gone adds up to no more than that part of the ceiling, however many go.
    local kept = sums.safe - min(own[SAFE], own[CHARGE])
    safe = min(slots, floor(keep * all * own[WEIGHT] / max(sums.weights, 1)), max(0, floor(keep * all) - kept))
  end
  if safe < min(own[TOLD_SAFE], own[CHARGE]) then own[VERSION] = next_version() end
  count(-1, own)
  own[SAFE] = min(max(own[SAFE], safe), own[CHARGE])
  own[TOLD_SAFE] = safe
  count(1, own)
end

-- Whether the holder lacks slots, and when it should ask again.
local ask_again = rate_again
if own and own[NEED] > own[CHARGE] and not is_closed and not learning then
  if full then
    place = 0
    local pass = pass_at(own, now)
    for id, r in pairs(records) do
      if r[NEED] > r[CHARGE] then
        local theirs = pass_at(r, now)
        if theirs < pass or theirs == pass and id < holder then place = place + 1 end
      end
    end
  end
  local function sooner(at)
    at = clamp(at, AGAIN_MIN, AGAIN_MAX)
    ask_again = ask_again and min(ask_again, at) or at
  end
  local by_time = again(max(0, sums.charge - ceiling) + place + 1)
  if by_time then sooner(by_time) end
  if not full or plan.stored then sooner(max(0, plan.at + EVERY - now)) end
end

local others_lack, woken = false, {}
local spare = (learning or is_closed) and 0 or max(0, ceiling - sums.charge)
for _, id in ipairs(plan.lack) do
  if id ~= holder then
    others_lack = true
    if #woken < spare then woken[#woken + 1] = id end
  end
end

local grant = {
  epoch = s.epoch,
  version = own and own[VERSION] or 0,
  slots = slots,
  safe = own and min(own[TOLD_SAFE], slots) or 0,
  target = target,
  contended = others_lack or sums.charge > ceiling,
  turns = plan.needy > ceiling and (charge > 0 or target > 0),
  stale = stale,
  before = before,
  learning = learning and max(1, s.learn_until - now) or 0,
  again = ask_again,
  members = sums.members,
  weights = sums.weights,
  ceiling = ceiling,
  queued = sums.lack - (own and max(0, own[NEED] - own[CHARGE]) or 0),
  generation = control.generation,
  disagree = s.merged[9] or false,
}
-- An empty table would be written as an object.
local told = told_scopes(known, asked)
if #told > 0 then grant.scopes = told end
if #chunks > 0 then grant.rates = chunks end

-- ---------------------------------------------------------------- writing down, waking

-- First what is gone: the holder's own record may be among it, and be there again. In parts, since a call takes
-- only so many arguments.
for i = 1, #gone, 1000 do
  redis.call('HDEL', key, unpack(gone, i, min(i + 999, #gone)))
end
if own then dirty[holder] = true end
local fields = { 's', cmsgpack.pack(s) }
for id in pairs(dirty) do
  if records[id] then
    fields[#fields + 1] = id
    fields[#fields + 1] = cmsgpack.pack(records[id])
  end
end
for i = 1, #fields, 1000 do
  redis.call('HSET', key, unpack(fields, i, min(i + 999, #fields)))
end

local message = wake_all and '*' or table.concat(woken, ',')
-- A user who may not publish has no wake-ups; the step is done all the same.
if message ~= '' then pcall(redis.call, publish, channel, message) end

return cjson.encode(grant)
