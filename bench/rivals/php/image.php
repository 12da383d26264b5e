<?php
// What zimg's tables ask for, in PHP: /FILE gives a file as it is, /FILE?w=W&h=H a JPEG of it that covers W × H and
// is cut to it, or with p=4 fits inside; g=1 makes it gray, q is its quality.
// nginx says where the files are (FOLDER), what makes renditions (ENGINE: gd or imagick) and where they are kept (KEPT,
// or nothing).

$file = $_SERVER['FOLDER'] . '/' . basename(parse_url($_SERVER['REQUEST_URI'], PHP_URL_PATH));
if (!is_file($file)) {
    http_response_code(404);
    exit;
}
header('Content-Type: image/jpeg');
header('Cache-Control: max-age=7776000');
$width = (int) ($_GET['w'] ?? 0);
$height = (int) ($_GET['h'] ?? 0);
if ($width < 1 || $height < 1 || $width > 4096 || $height > 4096) {
    send_file($file);
    exit;
}
$fits = ($_GET['p'] ?? '1') === '4';
$gray = ($_GET['g'] ?? '0') === '1';
$quality = max(1, min(100, (int) ($_GET['q'] ?? 75)));
$kept = $_SERVER['KEPT'] === '' ? '' : "{$_SERVER['KEPT']}/" . md5("$file $width $height $fits $gray $quality") . '.jpg';
if ($kept !== '' && is_file($kept)) {
    send_file($kept);
    exit;
}
$made = $_SERVER['ENGINE'] === 'imagick'
    ? make_with_imagick($file, $width, $height, $fits, $gray, $quality)
    : make_with_gd($file, $width, $height, $fits, $gray, $quality);
if ($kept !== '') {
    $part = "$kept." . getmypid();
    file_put_contents($part, $made);
    rename($part, $kept);
}
header('Content-Length: ' . strlen($made));
echo $made;

function send_file(string $file): void
{
    header('Content-Length: ' . filesize($file));
    readfile($file);
}

function make_with_gd(string $file, int $width, int $height, bool $fits, bool $gray, int $quality): string
{
    $image = imagecreatefromjpeg($file);
    $cols = imagesx($image);
    $rows = imagesy($image);
    if ($fits) {
        $scale = min($width / $cols, $height / $rows);
        $width = max(1, (int) round($cols * $scale));
        $height = max(1, (int) round($rows * $scale));
    }
    // The part of the source that is seen.
    $scale = max($width / $cols, $height / $rows);
    $across = min($cols, (int) round($width / $scale));
    $down = min($rows, (int) round($height / $scale));
    $made = imagecreatetruecolor($width, $height);
    $left = intdiv($cols - $across, 2);
    $top = intdiv($rows - $down, 2);
    imagecopyresampled($made, $image, 0, 0, $left, $top, $width, $height, $across, $down);
    if ($gray) {
        imagefilter($made, IMG_FILTER_GRAYSCALE);
    }
    ob_start();
    imagejpeg($made, null, $quality);
    return ob_get_clean();
}

function make_with_imagick(string $file, int $width, int $height, bool $fits, bool $gray, int $quality): string
{
    $image = new Imagick();
    // The JPEG decoder scales by itself, down to twice what is wanted.
    $image->setOption('jpeg:size', 2 * $width . 'x' . 2 * $height);
    $image->readImage($file);
    if ($fits) {
        $image->thumbnailImage($width, $height, true);
    } else {
        $image->cropThumbnailImage($width, $height);
    }
    if ($gray) {
        $image->transformImageColorspace(Imagick::COLORSPACE_GRAY);
    }
    $image->stripImage();
    $image->setImageFormat('jpeg');
    $image->setImageCompressionQuality($quality);
    return $image->getImageBlob();
}
