-- Types of images by name: GET /ID?t=thumb300. Use it with --script conf/scripts/types.lua, or change a copy.
--
-- For each request whose rendition is not there yet, f() says what to do with the image by calling zimg.*:
--
--   zimg.type()                    the name that t= gave
--   zimg.cols() zimg.rows()        width and height as people see them, after all that was done so far
--   zimg.quality() zimg.format()   100 where it is not known; "JPEG", "PNG", "GIF", "WEBP" …
--   zimg.scale(cols, rows)         to exactly this size
--   zimg.crop(x, y, cols, rows)    what of this lies in the image
--   zimg.rotate(degrees)           clockwise, on a canvas that grows
--   zimg.gray()  zimg.set_quality(1 to 100)  zimg.set_format(name)
--   zimg.ret(code)                 1: done. 0: done, but do not keep it. -1, or never called: there is no such image
--   log.print(level, text)         0 to 7 as in syslog: 3 is an error, 4 a warning, 6 information, 7 is for debugging
--
-- Calls that change something return 1 when they worked, else 0 or -1.

local OK, FAILED = 1, -1

-- square: covers a square, whose middle is kept. side: the longest. width: nothing is enlarged by this or by side.
-- crop: the middle, not scaled.
local types = {
    test      = { square = 100, rotate = 90, gray = true, quality = 75 },
    original  = { quality = 70 },
    thumb300  = { square = 300, quality = 85 },
    square    = { square = 500, quality = 85 },
    thumbnail = { side = 120, quality = 85 },
    small     = { side = 200, quality = 85 },
    middle    = { width = 440, quality = 90 },
    large     = { width = 2048, quality = 95 },
    webp500   = { width = 500, quality = 90, format = "webp" },
    crop200   = { crop = 200, quality = 90 },
}

local function round(number)
    return math.max(1, math.floor(number + 0.5))
end

local function crop_middle(size)
    local cols, rows = math.min(size, zimg.cols()), math.min(size, zimg.rows())
    return zimg.crop(math.floor((zimg.cols() - cols) / 2), math.floor((zimg.rows() - rows) / 2), cols, rows)
end

local function scale_by(factor)
    return zimg.scale(round(zimg.cols() * factor), round(zimg.rows() * factor))
end

local function cover_square(size)
    local done = scale_by(size / math.min(zimg.cols(), zimg.rows()))
    if done ~= OK then
        return done
    end
    return crop_middle(size)
end

local function shrink(side, to)
    if side <= to then
        return OK
    end
    return scale_by(to / side)
end

-- What each word of the table above does, in this order.
local steps = {
    { "square",  cover_square },
    { "side",    function(to) return shrink(math.max(zimg.cols(), zimg.rows()), to) end },
    { "width",   function(to) return shrink(zimg.cols(), to) end },
    { "crop",    crop_middle },
    { "rotate",  zimg.rotate },
    { "gray",    zimg.gray },
    { "quality", zimg.set_quality },
}

function f()
    local wanted = types[zimg.type()]
    if not wanted then
        return zimg.ret(FAILED)
    end
    for _, step in ipairs(steps) do
        local name, carry_out = step[1], step[2]
        if wanted[name] and carry_out(wanted[name]) ~= OK then
            log.print(4, "type " .. zimg.type() .. ": " .. name .. " could not be done")
            return zimg.ret(FAILED)
        end
    end
    -- A GIF stays one, and keeps its frames.
    if wanted.format or zimg.format() ~= "GIF" then
        zimg.set_format(wanted.format or "jpeg")
    end
    zimg.ret(OK)
end
