-- The token of one key: { n = closed until (us of the server's clock), s = streak, h = holder, i = kept for (ms) after that }.
-- KEYS[1]; ARGV[1] what to do. The answer: { done?, microseconds that it is still closed, streak, holder }.
local what = ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local token = redis.pcall('HMGET', KEYS[1], 'n', 's', 'h', 'i')
local closed, streak, holder, idle
if not token.err then closed, streak, holder, idle = tonumber(token[1]), tonumber(token[2]), token[3], tonumber(token[4]) end
-- What is not whole is not ours: it is begun anew.
if not (closed and streak and holder and idle) then
  closed, streak, holder, idle = nil, 0, '', 0
end

local function put()
  if token.err then redis.call('DEL', KEYS[1]) end
  redis.call('HSET', KEYS[1], 'n', string.format('%.0f', closed), 's', string.format('%.0f', streak), 'h', holder,
    'i', string.format('%.0f', idle))
  redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', math.ceil(closed / 1000) + idle))
end

local function wait()
  return string.format('%.0f', math.max(closed - now, 0))
end

if what == 'claim' then
  -- 2 holder, 3 base, 4 factor, 5 cap, 6 last exponent, 7 what jitter multiplies by, 8 hold, 9 idle; us, and idle in ms
  if closed and closed > now then return { 0, wait(), string.format('%.0f', streak), holder } end
  streak = math.min(streak + 1, 4294967295)
  local grown = tonumber(ARGV[3]) * tonumber(ARGV[4]) ^ math.min(streak - 1, tonumber(ARGV[6]))
  local window = math.min(grown, tonumber(ARGV[5])) * tonumber(ARGV[7])
  window = math.ceil(math.max(window, tonumber(ARGV[8]), 1))
  closed, holder, idle = now + window, ARGV[2], tonumber(ARGV[9])
  put()
  return { 1, string.format('%.0f', window), string.format('%.0f', streak), holder }
end
if not closed then return { 0, '0', '0', '' } end
if what == 'peek' then return { 1, wait(), string.format('%.0f', streak), holder } end
if what == 'sweep' then
  if closed + tonumber(ARGV[2]) > now then return { 0, '0', '0', '' } end
  redis.call('DEL', KEYS[1])
  return { 1, '0', '0', '' }
end
if holder ~= ARGV[2] then return { 0, '0', '0', '' } end
if what == 'clear' then
  redis.call('DEL', KEYS[1])
else -- extend, by ARGV[3] us
  local until_then = now + tonumber(ARGV[3])
  if until_then > closed then
    closed = until_then
    put()
  end
end
return { 1, wait(), string.format('%.0f', streak), holder }
